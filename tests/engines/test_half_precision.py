"""In float16 and bfloat16 on the CPU a capture holds, bit for bit, what a plain hook sees at that module."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from interp.engines.base import Request
from tests.engines.test_edits import BY_HAND
from tests.families.loaded import engine, hook_count

DTYPES = (torch.float16, torch.bfloat16)
CELLS = [(family, point) for family, points in BY_HAND.items() for point in points]


def hooked(module: Any, family: str, point: str, tokens: list[int], new: int) -> Tensor:
    """What a plain hook sees at `point` of layer 1, [pos, width], while transformers runs and continues the tokens."""
    path, side, factor = BY_HAND[family][point]
    seen: list[Tensor] = []

    def keep(value: Tensor) -> None:
        if value.ndim == 4:  # norms inside attention have their heads before the positions
            value = value.transpose(1, 2)
        seen.append((value if factor == 1 else value * factor).reshape(-1, value.shape[-1]).clone())

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        keep(output if isinstance(output, Tensor) else output[0])

    at = module.get_submodule(path)
    taken = (
        at.register_forward_pre_hook(before, with_kwargs=True) if side == "input" else at.register_forward_hook(after)
    )
    ids, cache = torch.tensor([tokens]), None
    with torch.no_grad():
        output = module(input_ids=ids, use_cache=new > 0)
        for _ in range(new - 1):
            cache = output["cache"]
            ids = output.logits[:, -1:].argmax(-1)
            output = module(input_ids=ids, cache=cache, use_cache=True)
    taken.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", BY_HAND)
def test_every_point_is_served_in_the_models_own_dtype(family: str, dtype: torch.dtype) -> None:
    model = engine(family, dtype)
    points = [f"{point}.1" for point in BY_HAND[family]]
    (result,) = model.run([Request([11, 64, 2, 5], capture=points)])
    for point in points:
        tensor = result.capture[point]
        assert tensor.dtype == dtype and len(tensor) == 4, point
        assert tensor.isfinite().all() and tensor.float().std() > 0, point


@settings(max_examples=60)
@given(
    cell=st.sampled_from(CELLS),
    dtype=st.sampled_from(DTYPES),
    tokens=st.lists(st.integers(3, 130), min_size=1, max_size=12),
    new=st.integers(0, 4),
    among=st.booleans(),
)
def test_a_capture_is_what_a_plain_hook_sees(
    cell: tuple[str, str], dtype: torch.dtype, tokens: list[int], new: int, among: bool
) -> None:
    """Alone or among all others, on a prompt and while it is continued."""
    family, point = cell
    model = engine(family, dtype)
    hooks = hook_count(model.module)
    points = [f"{name}.1" for name in (BY_HAND[family] if among else [point])]
    (result,) = model.run([Request(tokens, capture=points, max_new_tokens=new)])
    n_new = len(result.tokens) - len(tokens)  # fewer than `new` where the model ends the text
    right = hooked(model.module, family, point, tokens, n_new)
    ours = result.capture[f"{point}.1"]
    assert torch.equal(ours.reshape(right.shape), right)
    assert hook_count(model.module) == hooks
