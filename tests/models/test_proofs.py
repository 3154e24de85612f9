"""The proofs have negative controls: a wrong role, and a wrong number at any point, makes the claim about it fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from interp.engines.base import Request
from interp.engines.doctor import prove, refuse_unproven
from interp.engines.eager import EagerEngine
from interp.errors import PointRefused
from interp.models.anatomy import Anatomy, Block, Tap
from interp.models.proofs import Claim, check, needed
from interp.models.transforms import Channels, Scale
from interp.points import Address
from tests.families.loaded import engine
from tests.families.tiny import N_LAYERS

LAYER = 1


def with_block(anatomy: Anatomy, change: Callable[[Any], Block]) -> Anatomy:
    blocks = list(anatomy.blocks)
    blocks[LAYER] = change(blocks[LAYER])
    return replace(anatomy, blocks=tuple(blocks), refused={})


def refused(family: str, anatomy: Anatomy) -> tuple[EagerEngine, list[Claim]]:
    """An engine on a faulty anatomy after its proofs, and the claims that failed."""
    sound = engine(family)
    faulty = EagerEngine(sound.module, None, anatomy, sound.model)
    claims = [claim for claim in refuse_unproven(faulty) if not claim.holds]
    assert claims and all(claim.difference > 1e6 * claim.tolerance for claim in claims)
    return faulty, claims


def permuted(tap: Tap, order: list[int]) -> Tap:
    step = tap.steps[-1]
    assert isinstance(step, Channels)
    return replace(tap, steps=(*tap.steps[:-1], Channels(step.index[order])))


def raw_for_contribution(block: Any) -> Block:
    return replace(block, attn=replace(block.attn, contribution=block.attn.raw))


def gain_dropped(block: Any) -> Block:
    norm = block.attn.pre_norm
    return replace(block, attn=replace(block.attn, pre_norm=replace(norm, gain_offset=norm.gain_offset + 1.0)))


def values_permuted(block: Any) -> Block:
    """Channels and weight agree with each other, and only the mixing shows that the heads are exchanged."""
    value = block.mixer.value
    swapped = replace(value, tap=permuted(value.tap, [1, 0]), index=value.index[[1, 0]])
    return replace(block, mixer=replace(block.mixer, value=swapped))


def queries_permuted(block: Any) -> Block:
    query = block.mixer.query
    return replace(block, mixer=replace(block.mixer, query=replace(query, tap=permuted(query.tap, [1, 0, 2, 3, 4, 5]))))


def scaling_wrong(block: Any) -> Block:
    return replace(block, mixer=replace(block.mixer, scaling=block.mixer.scaling * 1.01))


def heads_permuted(block: Any) -> Block:
    return replace(block, mixer=replace(block.mixer, z=permuted(block.mixer.z, [0, 2, 1, 3, 4, 5])))


def multiplier_forgotten(block: Any) -> Block:
    return replace(block, mlp=replace(block.mlp, contribution=block.mlp.raw, multiplier=1.0))


def multiplier_wrong(block: Any) -> Block:
    tap = replace(block.mlp.contribution, steps=(Scale(0.23),))
    return replace(block, mlp=replace(block.mlp, contribution=tap))


def other_activation(block: Any) -> Block:
    return replace(block, neurons=replace(block.neurons, activation=torch.nn.functional.gelu))


def branches_exchanged(block: Any) -> Block:
    n = block.neurons
    return replace(block, neurons=replace(n, pre=n.pre_linear, pre_linear=n.pre))


FAULTS = [
    ("gemma2", raw_for_contribution, "attn_out_post", "P1"),
    ("gemma3", raw_for_contribution, "attn_out_post", "P3"),
    ("llama", gain_dropped, "attn_in", "P8"),
    ("gpt2", gain_dropped, "attn_in", "P8"),
    ("llama", values_permuted, "value", "P5"),
    ("qwen3", values_permuted, "value", "P5"),
    ("llama", heads_permuted, "z", "P5"),
    ("llama", queries_permuted, "query", "P5"),
    ("gemma2", scaling_wrong, "query_rot", "P5"),
    ("bloom", scaling_wrong, "attn_scores", "P5"),  # a bias by distance is added to its scores
    ("falcon", scaling_wrong, "key_rot", "P5"),
    ("granite", multiplier_forgotten, "mlp_out_post", "P1"),
    ("granite", multiplier_wrong, "mlp_out_post", "P3"),
    ("llama", other_activation, "mlp_pre", "P6"),
    ("llama", branches_exchanged, "mlp_pre_linear", "P6"),
]


@pytest.mark.parametrize(("family", "fault", "point", "proof"), FAULTS)
def test_a_wrong_role_is_refused_with_both_numbers(family: str, fault: Any, point: str, proof: str) -> None:
    faulty, claims = refused(family, with_block(engine(family).anatomy, fault))
    claim = next(c for c in claims if c.proof == proof and point in c.points)
    assert claim.layer == LAYER
    with pytest.raises(PointRefused) as refusal:
        faulty.run([Request([1, 2], capture=[f"{point}.{LAYER}"])])
    sentence = str(refusal.value)
    assert f"{point}.{LAYER}" in sentence and "is off by" in sentence
    numbers = {f"{c.difference:.3g}" for c in claims if point in c.points}, {f"{c.tolerance:.3g}" for c in claims}
    assert all(any(number in sentence for number in kind) for kind in numbers)
    assert faulty.support(f"{point}.0").readable  # the other layers are as sound as before
    assert not faulty.support(f"{point}.{LAYER}").readable


def test_a_point_one_layer_off_is_refused() -> None:
    anatomy = engine("llama").anatomy
    shifted = with_block(anatomy, lambda block: replace(block, attn=anatomy.blocks[LAYER + 1].attn))
    faulty, _ = refused("llama", shifted)
    assert not faulty.support(f"attn_out_post.{LAYER}").readable
    assert not faulty.support(f"attn_in.{LAYER}").readable


def test_a_stream_read_one_block_early_is_refused() -> None:
    anatomy = engine("llama").anatomy
    faulty, _ = refused("llama", with_block(anatomy, lambda block: replace(block, input=anatomy.blocks[0].input)))
    assert not faulty.support(f"resid_pre.{LAYER}").readable


@pytest.mark.parametrize(
    ("family", "change"),
    [("granite", {"scale": 1.0}), ("cohere", {"scale": 1.0}), ("gemma2", {"cap": None}), ("gemma2", {"cap": 6.0})],
)
def test_a_head_without_its_scale_or_cap_is_refused(family: str, change: dict[str, Any]) -> None:
    anatomy = engine(family).anatomy
    faulty, claims = refused(family, replace(anatomy, head=replace(anatomy.head, **change), refused={}))
    assert {claim.proof for claim in claims} == {"P4"}
    assert not faulty.support("logits").readable


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite", "gpt_neox_parallel", "bloom", "mpt", "falcon"])
def test_a_wrong_number_at_any_point_fails_a_claim_that_vouches_for_it(family: str) -> None:
    anatomy = engine(family).anatomy
    every = [a for a in needed(anatomy) if a.layer in (LAYER, None) or str(a) == f"resid_post.{N_LAYERS - 1}"]
    captured = dict(engine(family).run([Request([7, 3, 99, 64], capture=needed(anatomy))])[0].capture)
    assert all(claim.holds for claim in check(anatomy, [captured]))
    blind = []
    for address in every:
        wrong = captured | {address: captured[address] * 1.0001 + 1e-6}
        failed = [claim for claim in check(anatomy, [wrong]) if not claim.holds]
        vouched = [c for c in failed if address.name in c.points and c.layer == address.layer]
        if not vouched:
            blind.append(address.name)
    assert not blind


def test_a_claim_keeps_its_worst_prompt() -> None:
    anatomy = engine("llama").anatomy
    good = dict(engine("llama").run([Request([7, 3], capture=needed(anatomy))])[0].capture)
    bad = good | {Address("resid_mid", 0): good[Address("resid_mid", 0)] + 1.0}
    for prompts in ([good, bad], [bad, good]):
        assert not all(claim.holds for claim in check(anatomy, prompts))


def test_a_nan_holds_no_claim() -> None:
    anatomy = engine("llama").anatomy
    good = dict(engine("llama").run([Request([7, 3], capture=needed(anatomy))])[0].capture)
    bad = good | {Address("resid_mid", 0): good[Address("resid_mid", 0)] * float("nan")}
    failed = [claim for claim in check(anatomy, [bad]) if not claim.holds]
    assert any("resid_mid" in claim.points for claim in failed)


def test_the_proof_batch_has_two_unequal_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = engine("llama")
    lengths: list[list[int]] = []
    run = sound.run
    monkeypatch.setattr(
        sound, "run", lambda requests: (lengths.append([len(r.tokens) for r in requests]), run(requests))[1]
    )
    prove(sound)
    assert len(set(lengths[0])) == 2
