"""A second load proves nothing and refuses the same; whatever the claims depend on has them proven anew."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from interp.engines import doctor, load, proof_cache
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.load import load_model
from interp.errors import PointRefused
from interp.models.anatomy import Anatomy
from interp.models.proofs import needed
from interp.models.resolve import resolve
from tests.families.tiny import build


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tiny"
    build("qwen3").save_pretrained(folder)  # type: ignore[operator]
    return folder


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry per forward pass of a whole model: how many prompts it had."""
    seen: list[int] = []
    call = nn.Module.__call__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self).__name__ == "Qwen3Model":
            seen.append(len(kwargs["input_ids"]))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", counted)
    yield seen


def loaded(folder: Path, said: list[str] | None = None, **options: Any) -> EagerEngine:
    return load_model(folder, device="cpu", report=(said if said is not None else []).append, **options)


def refusals(engine: EagerEngine) -> dict[str, str]:
    return {str(address): refusal.reason for address, refusal in engine.anatomy.refused.items()}


def test_a_load_costs_one_pass_to_resolve_and_one_to_prove_and_the_second_proves_nothing(
    checkpoint: Path, forwards: list[int]
) -> None:
    first = loaded(checkpoint)
    assert forwards == [1, 2]  # one prompt to resolve, one batch of two to prove
    second = loaded(checkpoint)
    assert forwards == [1, 2, 1]
    assert refusals(second) == refusals(first)
    assert needed(second.anatomy) == needed(first.anatomy)
    (a,), (b,) = (engine.run([Request([5, 7], capture=["attn_probs.1"])]) for engine in (first, second))
    assert torch.equal(a.capture["attn_probs.1"], b.capture["attn_probs.1"])


def test_a_failed_claim_is_refused_from_the_cache_with_both_numbers(
    checkpoint: Path, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*arguments: Any) -> Anatomy:
        anatomy = resolve(*arguments)
        first, second, *rest = anatomy.blocks
        mixer: Any = second.mixer
        wrong = replace(second, mixer=replace(mixer, scaling=mixer.scaling * 1.01))
        return replace(anatomy, blocks=(first, wrong, *rest))

    monkeypatch.setattr(load, "resolve", faulty)
    first = loaded(checkpoint)
    monkeypatch.setattr(doctor, "prove", lambda engine: pytest.fail("it was proven before"))
    second = loaded(checkpoint)
    assert refusals(second) == refusals(first) and "attn_scores.1" in refusals(second)
    for engine in (first, second):
        with pytest.raises(PointRefused, match=r"query_rot\.1.*is off by .* units of rounding where .* are explained"):
            engine.run([Request([5, 7], capture=["query_rot.1"])])
        assert engine.support("query_rot.0").readable


def changed_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


def changed_weight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("qwen3", seed=1).save_pretrained(folder)  # type: ignore[operator]


def weight_that_no_sample_sees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))


def other_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = proof_cache.importlib.metadata.version
    monkeypatch.setattr(
        proof_cache.importlib.metadata, "version", lambda name: "9.9" if name == "transformers" else version(name)
    )


def other_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_cache, "_our_code", lambda: "another prover")


CHANGES = [changed_config, changed_weight, weight_that_no_sample_sees, other_version, other_code]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_the_claims_depend_on_has_them_proven_anew(
    change: Any, checkpoint: Path, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(checkpoint)
    change(checkpoint, monkeypatch)
    loaded(checkpoint)
    assert forwards == [1, 2, 1, 2]
    loaded(checkpoint)
    assert forwards == [1, 2, 1, 2, 1]


def test_another_dtype_is_another_proof(checkpoint: Path, forwards: list[int]) -> None:
    for dtype in ("float32", "float64", "float32", "float64"):
        loaded(checkpoint, dtype=dtype)
    assert forwards == [1, 2, 1, 2, 1, 1]


def test_each_module_of_our_own_that_claims_depend_on_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), read_bytes(path))[1])
    proof_cache._our_code.__wrapped__()
    assert {"table.py", "equations.py", "proofs.py", "resolve.py", "eager.py", "hooks.py", "doctor.py"} <= set(read)


DAMAGE = [
    "",
    "{",
    "[]",
    '{"claims": 3}',
    '{"key": {}, "claims": [{"proof": "P1"}]}',
    '{"claims": []}',
    "\udcff",
    "INTACT",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_said_once_ignored_and_rewritten(
    damage: str, checkpoint: Path, forwards: list[int], tmp_path: Path
) -> None:
    loaded(checkpoint)
    (path,) = (tmp_path / "cache" / "proofs").iterdir()
    intact = path.read_text()
    path.write_bytes(
        damage.replace("INTACT", intact.replace('"layer": 1', '"layer": 0')).encode(errors="surrogateescape")
    )
    said: list[str] = []
    engine = loaded(checkpoint, said)
    assert len([line for line in said if "damaged" in line and str(path) in line]) == 1
    assert forwards == [1, 2, 1, 2] and engine.support("resid_mid.1").readable
    loaded(checkpoint, said)
    assert forwards == [1, 2, 1, 2, 1] and len([line for line in said if "damaged" in line]) == 1


def test_a_cache_that_cannot_be_written_is_said_and_stops_nothing(
    checkpoint: Path, tmp_path: Path, forwards: list[int]
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    said: list[str] = []
    assert loaded(checkpoint, said).support("resid_mid.1").readable
    assert len([line for line in said if "not kept" in line]) == 1
    loaded(checkpoint, said)
    assert forwards == [1, 2, 1, 2]


def test_a_model_in_memory_and_an_unproven_load_keep_nothing(checkpoint: Path, tmp_path: Path) -> None:
    load.wrap(build("qwen3"))
    loaded(checkpoint, prove=False)
    assert not (tmp_path / "cache" / "proofs").exists()


def test_claims_come_back_as_they_were(checkpoint: Path, tmp_path: Path) -> None:
    engine = loaded(checkpoint)
    claims = doctor.prove(loaded(checkpoint, prove=False))
    (path,) = (tmp_path / "cache" / "proofs").iterdir()
    kept = [proof_cache._claim(**fields) for fields in json.loads(path.read_text())["claims"]]
    assert kept == claims and asdict(kept[0])["points"] == claims[0].points
    assert engine.support("resid_mid.1").writable
