"""What a model is, in numbers and names: no modules, nothing that needs torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of one list in a row, and their dimensions."""

    name: str
    """Path of the module that lists them, as `named_modules` spells it."""
    start: int
    """Its first layer, counted through all groups."""
    stop: int
    """The layer behind its last."""
    d_model: int
    n_heads: int
    """0 where no layer has softmax attention; of the first layer that has."""
    n_kv_heads: int
    d_head: int
    d_mlp: int
    """0 where the layers differ or no MLP is dense."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model that everything above the engines may rely on.

    Where groups of blocks differ, the dimensions are those of the last group, whose stream the head reads.
    """

    name: str
    """What the user asked for: a hub id, a packaged name or a directory's name."""
    family: str
    """The checkpoint's own model type, for display; nothing is decided by it."""
    fingerprint: str
    """Hash of the configuration and of a sample of the weights."""
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_mlp: int
    """0 where the layers differ or no MLP is dense."""
    d_vocab: int
    n_ctx: int | None
    """Longest sequence that the configuration states, in tokens; None where it states none."""
    bos_token_id: int | None
    dtype: str
    device: str
    parallel: bool
    """Whether attention and MLP read the same stream and are added together."""
    n_streams: int = 1
    """How many streams the trunk carries side by side; 1 but for hyper-connections."""
    blocks: tuple[str, ...] = ()
    """Path of each block."""
    groups: tuple[Group, ...] = ()
    """In the order in which they run; between two of them stands an adapter."""

    def width(self, layer: int | None) -> int:
        """Width of the stream in `layer`; of the last one where None."""
        return next((g.d_model for g in self.groups if layer is not None and g.start <= layer < g.stop), self.d_model)
