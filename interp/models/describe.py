"""From a resolved model to its ModelInfo."""

from itertools import groupby
from typing import Any

from torch import nn

from interp.models.anatomy import Anatomy, Mixer, Neurons
from interp.models.parameters import device_of, dtype_of
from interp.points import Group, ModelInfo


def describe(
    module: nn.Module, anatomy: Anatomy, *, name: str, fingerprint: str, d_vocab: int, n_ctx: int | None = None
) -> ModelInfo:
    """Dimensions are read from the resolved roles, and only what no run shows from the config."""
    config: Any = getattr(module, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    groups = _groups(anatomy)
    last = groups[-1]
    stated = getattr(text, "max_position_embeddings", None)
    return ModelInfo(
        name=name,
        family=str(getattr(config, "model_type", type(module).__name__)),
        fingerprint=fingerprint,
        n_layers=len(anatomy.blocks),
        d_model=anatomy.d_model,
        n_heads=last.n_heads,
        n_kv_heads=last.n_kv_heads,
        d_head=last.d_head,
        d_mlp=last.d_mlp,
        d_vocab=d_vocab,
        n_ctx=stated if n_ctx is None and isinstance(stated, int) and stated > 0 else n_ctx,
        bos_token_id=getattr(text, "bos_token_id", None),
        dtype=str(dtype_of(module)).removeprefix("torch."),
        device=str(device_of(module)),
        parallel=any(block.parallel for block in anatomy.blocks),
        n_streams=anatomy.n_streams,
        blocks=tuple(block.path for block in anatomy.blocks),
        groups=groups,
    )


def _groups(anatomy: Anatomy) -> tuple[Group, ...]:
    """Runs of blocks of one list."""
    found: list[Group] = []
    for _, numbered in groupby(enumerate(anatomy.blocks), lambda pair: pair[1].group):
        layers, blocks = zip(*numbered, strict=True)
        mixers = [block.mixer for block in blocks if isinstance(block.mixer, Mixer)]
        widths = {block.neurons.down.shape[1] for block in blocks if isinstance(block.neurons, Neurons)}
        found.append(
            Group(
                name=blocks[0].path.rpartition(".")[0],
                start=layers[0],
                stop=layers[-1] + 1,
                d_model=anatomy.width(layers[0]),
                n_heads=mixers[0].n_heads if mixers else 0,
                n_kv_heads=mixers[0].n_kv_heads if mixers else 0,
                d_head=mixers[0].d_head if mixers else 0,
                d_mlp=widths.pop() if len(widths) == 1 else 0,
            )
        )
    return tuple(found)
