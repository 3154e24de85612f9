"""Ours against TransformerLens' bridge on the same real weights: `python -m tests.real.parity` prints the table."""

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.models.checkpoint import resolve
from interp.names import spell
from interp.points import Address

from .conftest import GEMMA, SMOLLM, loaded

ROOT = Path(__file__).parents[2]
PROMPT = "The raw output of a sublayer is not always what the residual stream receives, and that is easily overlooked."
POINTS = (
    *("resid_pre", "attn_in", "query", "key", "value", "query_rot", "key_rot", "attn_probs", "z", "attn_out"),
    *("attn_out_post", "resid_mid", "mlp_in", "mlp_pre", "mlp_pre_linear", "mlp_act", "mlp_out", "mlp_out_post"),
    *("resid_post", "mlp_normalized"),
)
MATRIX = ("query_rot", "key_rot", "attn_probs")
"""Read in a run of their own, which computes attention as the bridge does; all others in an ordinary one."""


class Pair(NamedTuple):
    """One point at one layer."""

    address: Address
    name: str
    """The peer's."""
    difference: float
    """Largest absolute difference over the largest entry of ours."""


def pairs(engine: EagerEngine, shift: int = 0) -> list[Pair]:
    """Twenty points from the first layer to the last; the bridge's tensors are `shift` layers further on."""
    last = engine.model.n_layers - 1
    addresses = [Address(point, round(i * last / (len(POINTS) - 1))) for i, point in enumerate(POINTS)]
    shifted = [replace(address, layer=min(max((address.layer or 0) + shift, 0), last)) for address in addresses]
    names = [spell(address, "transformer_lens", engine.layout)[0] for address in shifted]
    assert not any(spelling.note for spelling in names), "shapes differ"
    ids = engine.to_tokens(PROMPT)[0].tolist()
    matrix = [address for address in addresses if address.name in MATRIX]
    rest = [address for address in addresses if address.name not in MATRIX]
    seen, others = engine.run([Request(ids, capture=matrix), Request(ids, capture=rest)])
    ours = dict(seen.capture) | dict(others.capture)
    theirs = _bridge(engine.model.name, ids, [spelling.name for spelling in names])
    found = []
    for address, (name, _) in zip(addresses, names, strict=True):
        own, other = ours[address], theirs[name][0]
        assert own.shape == other.shape, f"{address} has shape {list(own.shape)}, {name} {list(other.shape)}"
        found.append(Pair(address, name, float((own - other).abs().max() / own.abs().max())))
    return found


def _bridge(model: str, ids: list[int], names: list[str]):
    python = ROOT / ".peers" / "transformer_lens" / "bin" / "python"
    assert python.exists(), "transformer_lens has no environment: `make peers` creates it."
    script, folder = ROOT / "tests" / "peers" / "transformer_lens_points.py", resolve(model, lambda line: None).path
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": ""}
    with tempfile.TemporaryDirectory() as out:
        file = Path(out) / "cache.safetensors"
        command = [python, script, folder, file, json.dumps(ids), json.dumps(names)]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return load_file(file)


def table(engine: EagerEngine, found: list[Pair]) -> str:
    """One row per pair, the worst marked."""
    worst = max(found, key=lambda pair: pair.difference)
    lines = [f"{engine.model.name}, float32: largest difference over the tensor's largest entry"]
    for pair in found:
        mark = "  worst" if pair is worst else ""
        lines.append(f"  {pair.address!s:22} {pair.name:36} {pair.difference:9.2e}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    for model in (GEMMA, SMOLLM):
        print(table(loaded(model), pairs(loaded(model))), flush=True)  # noqa: T201
