"""Trunks of several streams: each point against what the model's own modules returned, written by hand."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.edits import Add, Replace
from interp.engines.base import Request
from interp.engines.doctor import prove, refuse_unproven
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.errors import PointRefused, UserError
from interp.models.tiny import tiny_model
from interp.models.transforms import Transposed
from interp.points import Address

TOKENS = [5, 9, 120, 33, 71, 5]
MIXED, ADDED = "deepseek_v4", "hy_v4"
"""One family remixes its streams at every sublayer, the other only adds to them."""


@cache
def engine_of(family: str) -> EagerEngine:
    engine = wrap(tiny_model(family), name=family, prove=False)
    refuse_unproven(engine)
    return engine


def by_hand(engine: EagerEngine, path: str) -> tuple[Tensor, ...]:
    """What the module at `path` returned in an ordinary pass, first row."""
    seen: list[Tensor] = []

    def keep(module, args, output) -> None:
        seen.extend(x[0].clone() for x in (output if isinstance(output, tuple) else (output,)) if x is not None)

    handle = engine.module.get_submodule(path).register_forward_hook(keep)
    with torch.no_grad(), engine.numerics():
        engine.module(input_ids=torch.tensor([TOKENS]), use_cache=False)
    handle.remove()
    return tuple(seen)


def captured(engine: EagerEngine, *points: str) -> dict[str, Tensor]:
    result = engine.run([Request(TOKENS, capture=points)])[0]
    return {point: result.capture[point] for point in points}


def test_every_point_is_what_the_hyper_connection_returned() -> None:
    engine = engine_of(MIXED)
    write, mix, collapsed = by_hand(engine, "model.layers.1.attn_hc")
    got = captured(engine, "attn_stream_write.1", "attn_stream_mix.1", "attn_stream_collapse.1", "resid_streams.1")
    assert torch.equal(got["attn_stream_write.1"], write)
    assert torch.equal(got["attn_stream_mix.1"], mix)
    assert torch.equal(got["attn_stream_collapse.1"], collapsed)
    assert torch.equal(got["resid_streams.1"], by_hand(engine, "model.layers.1")[0])


def test_the_streams_after_attention_are_the_remixed_ones_and_its_weighted_output() -> None:
    engine = engine_of(MIXED)
    write, mix, _ = by_hand(engine, "model.layers.1.attn_hc")
    before, out = by_hand(engine, "model.layers.0")[0], by_hand(engine, "model.layers.1.self_attn")[0]
    for k in range(3):
        right = write[:, k, None] * out + sum(mix[:, j, k, None] * before[:, j] for j in range(3))
        got = captured(engine, f"resid_mid.1.stream-{k}", f"resid_pre.1.stream-{k}")
        assert (got[f"resid_mid.1.stream-{k}"] - right).abs().max() < 1e-14 * right.abs().max()
        assert torch.equal(got[f"resid_pre.1.stream-{k}"], before[:, k])


def test_a_family_that_does_not_remix_says_so() -> None:
    engine = engine_of(ADDED)
    assert "not remixed" in engine.support("attn_stream_mix.1").reason
    write, before = by_hand(engine, "model.layers.1.attn_hc")[0], by_hand(engine, "model.layers.0")[0]
    out = by_hand(engine, "model.layers.1.self_attn")[0]
    got = captured(engine, "resid_mid.1.stream-2")["resid_mid.1.stream-2"]
    assert (got - before[:, 2] - write[:, 2, None] * out).abs().max() < 1e-14 * got.abs().max()


@pytest.mark.parametrize("family", [MIXED, ADDED])
def test_the_stream_is_named_one_at_a_time(family: str) -> None:
    engine = engine_of(family)
    assert engine.model.n_streams == 3
    with pytest.raises(PointRefused, match=r"carries 3 streams: name one.*resid_post\.1\.stream-0, resid_streams\.1"):
        engine.run([Request(TOKENS, capture=["resid_post.1"])])
    with pytest.raises(PointRefused, match="streams 0 to 2"):
        engine.run([Request(TOKENS, capture=["resid_post.1.stream-3"])])
    whole, one = captured(engine, "resid_streams.1", "resid_post.1.stream-1").values()
    assert torch.equal(whole[:, 1], one)
    assert not torch.equal(whole[:, 1], whole[:, 0])


def test_an_edit_of_one_stream_moves_that_stream_and_what_follows() -> None:
    engine = engine_of(MIXED)
    vector = torch.linspace(-1, 1, 48, dtype=torch.float64)

    def push(module, args, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, :, 1] += vector
        return output

    handle = engine.module.get_submodule("model.layers.1").register_forward_hook(push)
    with torch.no_grad(), engine.numerics():
        right = engine.module(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    handle.remove()
    for at in ("resid_post.1.stream-1", "resid_streams.1.stream-1"):
        edited = engine.run(
            [Request(TOKENS, capture=["resid_streams.1"], edits=[Add(at, vector)], return_logits=True)]
        )[0]
        plain = captured(engine, "resid_streams.1")["resid_streams.1"]
        moved = edited.capture["resid_streams.1"] - plain
        assert (moved[:, 1] - vector).abs().max() < 1e-14 and moved[:, [0, 2]].abs().max() == 0
        assert edited.logits is not None and torch.equal(edited.logits, right)
    whole = captured(engine, "resid_streams.1")["resid_streams.1"].flip(1)
    result = engine.run([Request(TOKENS, capture=["resid_pre.2.stream-0"], edits=[Replace("resid_streams.1", whole)])])[
        0
    ]
    assert torch.equal(result.capture["resid_pre.2.stream-0"], whole[:, 0])
    with pytest.raises(UserError, match="47 wide"):
        engine.run([Request(TOKENS, edits=[Add("resid_post.1.stream-1", vector[:47])])])


@pytest.mark.parametrize("family", [MIXED, ADDED])
def test_the_lens_collapses_the_streams_as_the_model_does(family: str) -> None:
    engine = engine_of(family)
    result = engine.run([Request(TOKENS, capture=["resid_streams.2"], return_logits=True)])[0]
    assert result.logits is not None
    assert (engine.unembed(result.capture["resid_streams.2"]) - result.logits).abs().max() < 1e-13
    with pytest.raises(UserError, match=r"\[\.\.\., 3, 48\]"):
        engine.unembed(result.capture["resid_streams.2"][:, 0])


def test_a_matrix_read_the_other_way_round_fails() -> None:
    engine = wrap(tiny_model(MIXED), name=MIXED, prove=False)
    assert all(claim.holds for claim in prove(engine))
    attn: Any = engine.anatomy.blocks[1].attn
    stack = attn.stack
    object.__setattr__(stack, "mix", stack.mix.then(Transposed()))
    bad = [claim for claim in prove(engine) if not claim.holds]
    assert {claim.proof for claim in bad} == {"P1"} and {claim.layer for claim in bad} == {1}
    assert max(claim.difference for claim in bad) > 1e6
    assert all("attn_stream_mix" in claim.points or "attn_stream_collapse" not in claim.points for claim in bad)


def test_a_collapse_of_other_streams_is_not_in_their_span() -> None:
    engine = wrap(tiny_model(MIXED), name=MIXED, prove=False)
    block: Any = engine.anatomy.blocks[1]
    object.__setattr__(block.attn.stack, "collapse", block.mlp.stack.collapse)
    bad = [c for c in prove(engine) if "attn_stream_collapse, w solved for" in c.equation and not c.holds]
    assert [claim.layer for claim in bad] == [1] and bad[0].difference > 1e6
    assert Address("attn_stream_collapse", 1).name in bad[0].points
