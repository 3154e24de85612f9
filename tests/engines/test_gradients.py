"""A backward reaches every captured point: its gradient is the derivative that edits measure."""

import pytest
import torch
from torch import Tensor

from interp.edits import Add, Edit
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from interp.errors import PointRefused, UserError
from interp.points import POINTS, Address
from tests.families.loaded import F64, PROMPTS, engine, readable, writable
from tests.families.tiny import SPLIT_LLAMAS

MANY = ["llama", "gpt2", "gemma3", "granite", "gpt_neox_parallel", "bloom", "mpt", "falcon", "olmo2", "opt", "gemma2"]
MANY += SPLIT_LLAMAS
TOKENS = [11, 64, 2, 130, 5, 5, 88]
WEIGHTS = torch.randn(131, generator=torch.Generator().manual_seed(1), dtype=F64)
STEP = 1e-5


def metric(logits: Tensor) -> Tensor:
    """A number that depends on the logits at every position."""
    return (logits.log_softmax(-1) * WEIGHTS).sum()


def moved(family: str, edit: Edit) -> float:
    (result,) = engine(family).run([Request(TOKENS, edits=[edit], return_logits=True)])
    assert result.logits is not None
    return float(metric(result.logits))


@pytest.mark.parametrize("family", MANY)
def test_gradients_equal_the_slope_that_an_edit_measures(family: str) -> None:
    """Every writable point of the middle layer and the trunk, resid_mid with its skip path among them."""
    model = engine(family)
    points = [p for p in writable(model) if p not in ("logits", "lm_head")]
    plain = run_with_cache(model, torch.tensor([TOKENS]), [*points, "logits"])
    cache = run_with_cache(model, torch.tensor([TOKENS]), [*points, "logits"], grad=True)
    for point in points:
        assert torch.equal(cache[point], plain[point]), f"{point}: another value than without gradients"
    found = torch.autograd.grad(metric(cache["logits"]), [cache[point] for point in points])
    generator = torch.Generator().manual_seed(2)
    for point, gradient in zip(points, found, strict=True):
        assert gradient.shape == cache[point].shape
        v = torch.randn(gradient.shape[2:], generator=generator, dtype=F64)
        up, down = (moved(family, Add(point, v, scale=s, positions=(2, 5))) for s in (STEP, -STEP))
        slope = float((gradient[0, [2, 5]] * v).sum())
        assert abs((up - down) / (2 * STEP) - slope) <= 1e-5 * (1 + abs(slope)), point


@pytest.mark.parametrize("family", ["llama", "gemma3", "split_llama"])
def test_inside_attention_too(family: str) -> None:
    model, at = engine(family), ["query_rot.1", "key_rot.1", "attn_scores.1", "attn_probs.1"]
    cache = run_with_cache(model, torch.tensor([TOKENS]), [*at, "logits"], grad=True)
    found = torch.autograd.grad(metric(cache["logits"]), [cache[a] for a in at])
    probs = cache["attn_probs.1"].detach()
    gradient = dict(zip(at, found, strict=True))
    # softmax by hand: dL/ds = p * (dL/dp - Σ p dL/dp)
    by_hand = probs * (gradient["attn_probs.1"] - (probs * gradient["attn_probs.1"]).sum(-1, keepdim=True))
    assert (gradient["attn_scores.1"] - by_hand).abs().max() < 1e-12 * by_hand.abs().max()
    v = torch.randn(10, generator=torch.Generator().manual_seed(2), dtype=F64)
    up, down = (moved(family, Add("query_rot.1.head-3", v, scale=s, positions=(4,))) for s in (STEP, -STEP))
    slope = float((gradient["query_rot.1"][0, 4, 3] * v).sum())
    assert abs((up - down) / (2 * STEP) - slope) <= 1e-5 * (1 + abs(slope))


def test_prompts_of_unequal_length_each_have_the_gradient_that_they_have_alone() -> None:
    model, at = engine("gemma2"), ["resid_post.0", "z.1.head-4", "mlp_act.2"]
    results = model.run([Request(p, capture=[*at, "logits"], grad=True, return_logits=True) for p in PROMPTS])
    total = sum((metric(r.capture["logits"]) for r in results), torch.zeros((), dtype=F64))
    for i, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        found = torch.autograd.grad(total, [result.capture[a] for a in at], retain_graph=True)
        (alone,) = model.run([Request(prompt, capture=[*at, "logits"], grad=True)])
        right = torch.autograd.grad(metric(alone.capture["logits"]), [alone.capture[a] for a in at])
        for a, b in zip(found, right, strict=True):
            assert a.shape == b.shape and (a - b).abs().max() <= 1e-11 * (1 + b.abs().max()), i
        assert result.logits is not None and result.logits.requires_grad


def test_padded_rows_of_the_batched_form_are_nan_and_touch_no_gradient() -> None:
    model = engine("gpt2")
    tokens, mask = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)
    tokens[0], mask[0] = torch.tensor([4, 8, 15, 16, 23, 42]), 1
    tokens[1, [0, 3, 4]], mask[1, [0, 3, 4]] = torch.tensor([9, 7, 5]), 1
    cache = run_with_cache(model, tokens, ["resid_post.0", "logits"], attention_mask=mask, grad=True)
    assert bool(cache["resid_post.0"][1, 1].isnan().all())
    (gradient,) = torch.autograd.grad(metric(cache["logits"][mask.bool()]), [cache["resid_post.0"]])
    (alone,) = model.run([Request([9, 7, 5], capture=["resid_post.0", "logits"], grad=True)])
    (right,) = torch.autograd.grad(metric(alone.capture["logits"]), [alone.capture["resid_post.0"]])
    assert (gradient[1, [0, 3, 4]] - right).abs().max() < 1e-11
    assert bool((gradient[1, [1, 2, 5]] == 0).all()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("family", ["llama", "gemma3", "split_llama"])
def test_points_that_are_only_read_are_where_a_backward_can_begin(family: str) -> None:
    model = engine(family)
    only_read = [a for a in readable(model, layers=[1]) if not model.support(a).writable]
    only_read = [a for a in only_read if Address.parse(a).name != "expert_indices"]
    cache = run_with_cache(model, torch.tensor([TOKENS]), ["resid_pre.1", *only_read], grad=True)
    assert any(POINTS[Address.parse(a).name].shape == ("one",) for a in only_read) or only_read
    for point in only_read:
        (gradient,) = torch.autograd.grad(cache[point].sum(), [cache["resid_pre.1"]], retain_graph=True)
        assert float(gradient.abs().max()) > 0, point
        with pytest.raises(PointRefused, match="has no gradient"):
            model.vjp(Request(TOKENS), {"logits": torch.ones(7, 131, dtype=F64)}, [point])


@pytest.mark.parametrize("family", ["llama", "split_llama"])
def test_vjp_is_the_gradient_of_the_weighted_sum(family: str) -> None:
    model = engine(family)
    at = {"resid_post.2": torch.randn(7, 48, dtype=F64), "attn_out.1": torch.randn(7, 48, dtype=F64)}
    found = model.vjp(Request(TOKENS), at, ["resid_pre.1", "mlp_out.0", "resid_post.2"])
    cache = run_with_cache(model, torch.tensor([TOKENS]), [*at, "resid_pre.1", "mlp_out.0"], grad=True)
    total = sum(((cache[a][0] * c).sum() for a, c in at.items()), torch.zeros((), dtype=F64))
    right = torch.autograd.grad(total, [cache[a] for a in ("resid_pre.1", "mlp_out.0")])
    for address, expected in zip(("resid_pre.1", "mlp_out.0"), right, strict=True):
        assert (found[Address.parse(address)] - expected[0]).abs().max() < 1e-12
    assert torch.equal(found[Address.parse("resid_post.2")], at["resid_post.2"])
    with pytest.raises(UserError, match=r"its cotangent is \[3, 48\]"):
        model.vjp(Request(TOKENS), {"resid_post.2": torch.ones(3, 48, dtype=F64)}, ["resid_pre.1"])


def test_parameters_take_no_part_and_are_left_as_they_were() -> None:
    model = engine("qwen3")
    parameter = next(iter(model.module.parameters()))
    parameter.requires_grad_(True)
    try:
        cache = run_with_cache(model, torch.tensor([TOKENS]), ["resid_post.1", "logits"], grad=True)
        metric(cache["logits"]).backward()
        assert parameter.grad is None and parameter.requires_grad and cache["resid_post.1"].requires_grad
        plain = run_with_cache(model, torch.tensor([TOKENS]), ["resid_post.1"])
        assert not plain["resid_post.1"].requires_grad
    finally:
        parameter.requires_grad_(False)


def test_captures_on_the_graph_are_copies_of_their_moment() -> None:
    """An in-place operation behind a tapped module changes neither the capture nor the gradient's right to run."""
    model = engine("llama")

    def doubled(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].mul_(2.0)

    points = ["resid_post.1", "mlp_out_post.1", "logits"]
    clean = run_with_cache(model, torch.tensor([TOKENS]), points)
    handle = model.module.get_submodule("model.layers.2").register_forward_pre_hook(doubled)
    try:
        plain = run_with_cache(model, torch.tensor([TOKENS]), points)
        cache = run_with_cache(model, torch.tensor([TOKENS]), points, grad=True)
    finally:
        handle.remove()
    assert torch.equal(plain["resid_post.1"], clean["resid_post.1"])
    assert not torch.equal(plain["logits"], clean["logits"])
    for point in plain:
        assert torch.equal(cache[point], plain[point])
    torch.autograd.grad(metric(cache["logits"]), [cache["resid_post.1"], cache["mlp_out_post.1"]])


def test_gradients_while_generating_are_refused() -> None:
    with pytest.raises(UserError, match="max_new_tokens=0"):
        engine("llama").run([Request([1], grad=True, max_new_tokens=2)])
