"""The estimate is the first-order term of the true patch: its error falls with the square of the difference.

A true patch by a fraction e of the difference, made by an edit, is compared with e times the estimate. Where everything
behind the point is linear, the two are one number at any distance.
"""

import math

import pytest
import torch

from interp.analysis import LogitDifference, activation_patching, attribution_patching
from interp.edits import Replace
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.errors import PointRefused, UserError
from interp.points import Address
from tests.analysis.subjects import CLEAN, CORRUPTED, FAMILIES, other, reader, subject
from tests.families.loaded import hook_count

METRIC = LogitDifference(5, 99)
LAST = 6


def errors_of_steps(model: EagerEngine, at: str, position: int, estimate: float, noising: bool = False) -> list[float]:
    """What the estimate misses when the point goes 1/500, 1/1000, 1/2000 of the way to the other prompt's value."""
    target, source = (CLEAN, CORRUPTED) if noising else (CORRUPTED, CLEAN)
    here, there = (result.capture[at] for result in model.run([Request(t, capture=[at]) for t in (target, source)]))
    fractions = (2e-3, 1e-3, 5e-4)
    steps = [[], *([Replace(at, here + e * (there - here), positions=(position,))] for e in fractions)]
    results = model.run([Request(target, edits=edits, return_logits=True) for edits in steps])
    before, *after = (float(r.logits[-1, 5] - r.logits[-1, 99]) for r in results if r.logits is not None)
    return [abs(value - before - e * estimate) for value, e in zip(after, fractions, strict=True)]


CELLS = [*((family, False) for family in FAMILIES), ("gpt2", True), ("gemma2", True)]


@pytest.mark.parametrize(("family", "noising"), CELLS)
def test_the_error_falls_with_the_square_of_the_difference(family: str, noising: bool) -> None:
    """A wrong first-order term would make it fall with the difference itself.

    OLMo 2's attention reads the stream as it is, Cohere's attention and MLP one normed tensor: the gradient at
    `attn_in` is that of attention alone.
    """
    model, points = subject(family), ["resid_post", "mlp_out", "attn_out", "attn_in"]
    found = attribution_patching(model, CLEAN, CORRUPTED, points, METRIC, noising=noising)
    assert found.metric.shape == (12, 7)
    for at, position in (("resid_post.1", LAST), ("mlp_out.0", 4), ("attn_out.1", LAST), ("attn_in.1", 4)):
        estimate = float(found[at].effect[0, position])
        assert abs(estimate) > 1e-7
        errors = errors_of_steps(model, at, position, estimate, noising)
        slopes = [math.log2(errors[i] / errors[i + 1]) for i in range(2)]
        assert all(1.9 < slope < 2.1 for slope in slopes), (at, slopes)


def test_one_stream_of_several_is_patched_by_itself() -> None:
    arguments = (other("hy_v4"), CLEAN, CORRUPTED, ["resid_post.1.stream-2", "resid_streams.1"], METRIC)
    estimate, true = attribution_patching(*arguments), activation_patching(*arguments)
    assert estimate.metric.shape == true.metric.shape == (2, 7) and true.effect[:, LAST].abs().min() > 1e-6
    errors = errors_of_steps(other("hy_v4"), "resid_post.1.stream-2", LAST, float(estimate.effect[0, LAST]))
    assert all(1.9 < math.log2(errors[i] / errors[i + 1]) < 2.1 for i in range(2))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_it_is_exact_where_what_follows_is_linear(family: str) -> None:
    """Behind the final norm there is a matrix and a factor; no cap in these families."""
    arguments = (subject(family), CLEAN, CORRUPTED, ["final_norm", "lm_head"], METRIC)
    estimate, true = attribution_patching(*arguments), activation_patching(*arguments)
    assert (estimate.metric - true.metric).abs().max() <= 1e-12
    assert float(estimate.recovered[0, LAST]) == pytest.approx(1.0, abs=1e-9)
    assert (estimate.clean, estimate.corrupted) == pytest.approx((true.clean, true.corrupted), abs=1e-12)
    assert (estimate.rows, estimate.columns) == (true.rows, true.columns)


def test_a_cap_bends_it() -> None:
    arguments = (subject("gemma2"), CLEAN, CORRUPTED, "final_norm", METRIC)
    assert float((attribution_patching(*arguments).metric - activation_patching(*arguments).metric).abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox_parallel", "split_llama"])
def test_a_point_is_the_sum_of_its_heads_and_groups_of_their_positions(family: str) -> None:
    model = subject(family)
    by_position = attribution_patching(model, CLEAN, CORRUPTED, ["z", "value"], METRIC)
    by_head = attribution_patching(model, CLEAN, CORRUPTED, ["z", "value"], METRIC, heads=True)
    assert (by_head.effect.nansum(-1) - by_position.effect.sum(-1)).abs().max() <= 1e-12
    groups = attribution_patching(model, CLEAN, CORRUPTED, "z", METRIC, positions=[[1, 4], LAST])
    right = torch.stack([by_position["z"].effect[:, [1, 4]].sum(-1), by_position["z"].effect[:, LAST]], -1)
    assert (groups.effect - right).abs().max() <= 1e-12
    some = attribution_patching(model, CLEAN, CORRUPTED, "z", METRIC, positions=[1, LAST], heads=True)
    assert (some.effect.nansum(-1) - by_position["z"].effect[:, [1, LAST]].sum(-1)).abs().max() <= 1e-12
    head = attribution_patching(model, CLEAN, CORRUPTED, "z.1.head-3", METRIC)
    assert float(head.effect.sum()) == pytest.approx(float(by_head["z"].effect[1, 3]), abs=1e-12)


def test_an_attention_pattern_is_estimated_too() -> None:
    model = subject("llama")
    by_head = attribution_patching(model, CLEAN, CORRUPTED, "attn_probs", METRIC, heads=True)
    by_query = attribution_patching(model, CLEAN, CORRUPTED, "attn_probs", METRIC)
    assert (by_head.effect.sum(-1) - by_query.effect.sum(-1)).abs().max() <= 1e-12
    masked = other("gpt_neo")  # its mask is an infinity
    assert masked.run([Request(CLEAN, capture=["attn_scores.1"])])[0].capture["attn_scores.1"].isinf().any()
    scores = attribution_patching(masked, CLEAN, CORRUPTED, "attn_scores", METRIC)
    assert scores.metric.isfinite().all() and scores.effect.abs().max() > 1e-6
    at, (estimate,) = "attn_probs.1.head-2", by_head["attn_probs"].effect[1, 2:3].tolist()
    here, there = (model.run([Request(tokens, capture=[at])])[0].capture[at] for tokens in (CORRUPTED, CLEAN))
    (plain, moved) = model.run(
        [
            Request(CORRUPTED, edits=edits, return_logits=True)
            for edits in ([], [Replace(at, here + 1e-4 * (there - here))])
        ]
    )
    assert plain.logits is not None and moved.logits is not None
    true = float((moved.logits - plain.logits)[-1, 5] - (moved.logits - plain.logits)[-1, 99])
    assert true == pytest.approx(1e-4 * estimate, rel=1e-2)


def test_it_takes_two_forward_passes_and_leaves_nothing_behind() -> None:
    model, hooks = subject("gpt2"), hook_count(subject("gpt2").module)
    passes: list[int] = []
    handle = model.anatomy.blocks[0].module.register_forward_hook(lambda *_: passes.append(1))
    attribution_patching(model, CLEAN, CORRUPTED, ["resid_post", "z", "mlp_out"], METRIC)
    handle.remove()
    assert len(passes) == 2 and hook_count(model.module) == hooks
    assert not any(p.requires_grad or p.grad is not None for p in model.module.parameters())


def test_text_and_any_differentiable_metric() -> None:
    found = attribution_patching(reader(), "w1 w2 w3", "w1 w7 w3", "resid_post", LogitDifference("w4", "w5"))
    assert found.columns == ("0 '<s>'", "1 'w1'", "2 'w7'", "3 'w3'") and found.rows[2] == Address("resid_post", 2)
    found = attribution_patching(
        subject("gpt2"), CLEAN, CORRUPTED, "final_norm", lambda logits: logits[-1].log_softmax(-1)[5]
    )
    assert found.effect.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"metric": lambda logits: logits[-1, 5].item()}, UserError, "No gradient"),
        ({"metric": lambda logits: logits[-1].argmax()}, UserError, "No gradient"),
        ({"metric": lambda logits: logits[-1]}, UserError, "one number"),
        ({"corrupted": [1, 2]}, UserError, "the clean prompt has 7 tokens"),
        ({"points": "head_out"}, PointRefused, "can be written in no layer"),
        ({"positions": [9]}, UserError, "Position 9 is outside"),
    ],
)
def test_what_cannot_be_asked(changed: dict, error: type[Exception], said: str) -> None:
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "points": "resid_post", "metric": METRIC} | changed
    with pytest.raises(error, match=said):
        attribution_patching(subject("llama"), **given)
