"""`interp capture MODEL --prompt … --points …`: named tensors of one prompt, in one safetensors file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from interp.scripts.console import check_output, say
from interp.scripts.loading import Loading

if TYPE_CHECKING:
    from interp.engines.base import Result
    from interp.points import ModelInfo


@dataclass
class CaptureCommand(Loading):
    """Run one prompt and save what the named points held."""

    model: Annotated[str, tyro.conf.Positional]
    """Packaged name, checkpoint directory, GGUF file or hub id."""
    prompt: str
    """Text; the tokenizer adds BOS if that is its default."""
    points: tuple[str, ...]
    """Addresses such as resid_post.10 mlp_out_post.4 final_norm, or hook names such as layers_first.0.resid_post."""
    out: Path = Path("acts.safetensors")
    """File to write: one tensor per address, [pos, ...], and the tokens."""
    max_new_tokens: int = 0
    """Tokens to generate greedily after the prompt; captured while decoding."""
    engine: str = "auto"
    """auto, eager or nnsight; docs/engines.md says what each serves."""


def run(config: CaptureCommand) -> None:
    """Write the file and say what is in it."""
    from interp.names import hooks

    for point in config.points:
        hooks.check(point)
    check_output(config.out.parent)
    from interp.engines.base import Request

    engine = config.load(config.model, engine=config.engine)
    addresses = [hooks.address(point, engine.model.blocks) for point in config.points]
    (result,) = engine.run([Request(config.prompt, capture=addresses, max_new_tokens=config.max_new_tokens)])
    save(config.out, result, engine.model, config.prompt)


def save(out: Path, result: "Result", model: "ModelInfo", prompt: str) -> None:
    """Write what a request has captured, and its tokens; say what is where."""
    import torch
    from safetensors.torch import save_file

    from interp.files import atomic_path

    tensors = {str(address): tensor.contiguous().cpu() for address, tensor in result.capture.items()}
    tensors["tokens"] = torch.tensor(result.tokens)
    provenance = {str(a): f"{s.module} {s.side} {s.transform}".strip() for a, s in result.provenance.sources.items()}
    metadata = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "prompt": prompt,
        "sources": json.dumps(provenance),
        "attention": result.provenance.attention,
    }
    with atomic_path(out) as path:
        save_file(tensors, path, metadata=metadata)
    for address, tensor in result.capture.items():
        say(f"{address}  {list(tensor.shape)}  from {provenance[str(address)]}")
    say(f"{len(result.tokens)} tokens, {len(result.capture)} tensors: {out}")
