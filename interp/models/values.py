"""What the nodes of a recorded pass held; what can be had again from the weights is not kept with them."""

from collections.abc import Callable

from torch import Tensor


class Values:
    """A tensor by node. One that was dropped is made again each time it is asked for."""

    def __init__(self) -> None:
        self._kept: list[Tensor | None] = []
        self._again: dict[int, Callable[[], Tensor]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, node: int) -> Tensor:
        kept = self._kept[node]
        return self._again[node]() if kept is None else kept

    def __setitem__(self, node: int, value: Tensor) -> None:
        self._kept[node] = value

    def append(self, value: Tensor) -> None:
        self._kept.append(value)

    def dropped(self, node: int) -> bool:
        return self._kept[node] is None

    def drop(self, node: int, again: Callable[[], Tensor]) -> Tensor:
        """Keep `again` instead of the tensor; the tensor."""
        kept, self._kept[node], self._again[node] = self[node], None, again
        return kept
