"""A write between the two sublayers reaches the MLP and the skip path alike, as in a forward written by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.edits import Ablate, Add, Edit, Replace, Scale
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.errors import PointRefused
from interp.models.anatomy import Refusal
from interp.points import Address
from tests.families.loaded import F64, PROMPTS, engine, hook_count
from tests.models.test_streams import unseen

TOKENS = [11, 64, 2, 130, 5, 5, 88]
MIDDLE = {
    "llama": ("model.layers.1", "post_attention_layernorm"),
    "gemma3": ("model.layers.1", "pre_feedforward_layernorm"),
    "olmo2": ("model.layers.1", "mlp"),
    "granite": ("model.layers.1", "post_attention_layernorm"),
    "gpt2": ("transformer.h.1", "ln_2"),
    "gpt_neox_sequential": ("gpt_neox.layers.1", "post_attention_layernorm"),
    "opt": ("model.decoder.layers.1", "final_layer_norm"),
    "bloom": ("transformer.h.1", "post_attention_layernorm"),
    "mpt": ("transformer.blocks.1", "norm_2"),
    "qwen3_moe": ("model.layers.1", "post_attention_layernorm"),
}
"""The block, and the module inside it that receives the stream between the sublayers."""


def by_hand(family: str, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(what the norm receives, logits): its input is changed, and the block's output by as much for the skip path."""
    model: Any = engine(family).module
    block, inner = MIDDLE[family]
    moved: list[Tensor] = []
    seen: list[Tensor] = []

    def before(m: Any, args: tuple) -> tuple:
        x = args[0]
        new = change(x.view(1, len(TOKENS), -1)).view(x.shape)
        moved.append((new - x).view(1, len(TOKENS), -1))
        seen.append(new.view(1, len(TOKENS), -1)[0])
        return (new, *args[1:])

    def after(m: Any, args: tuple, output: Any) -> Any:
        return output + moved[0] if isinstance(output, Tensor) else (output[0] + moved[0], *output[1:])

    handles = [
        model.get_submodule(f"{block}.{inner}").register_forward_pre_hook(before),
        model.get_submodule(block).register_forward_hook(after),
    ]
    with torch.no_grad(), engine(family).numerics():
        logits = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return seen[0], logits


def some(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(4), dtype=F64)


def at_two(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The change at positions 2 and 5 alone."""
    chosen = torch.tensor([p in (2, 5) for p in range(len(TOKENS))])[:, None]
    return lambda x: torch.where(chosen, change(x), x)


@pytest.mark.parametrize("family", MIDDLE)
def test_each_edit_equals_a_hand_written_forward_and_reads_back(family: str) -> None:
    model, v = engine(family), some(48)
    cells: list[tuple[Edit, Callable[[Tensor], Tensor]]] = [
        (Add("resid_mid.1", v), lambda x: x + v),
        (Scale("resid_mid.1", -0.5, positions=(2, 5)), at_two(lambda x: -0.5 * x)),
        (Replace("resid_mid.1", v, positions=(2, 5)), at_two(lambda x: v.expand_as(x))),
        (Ablate("resid_mid.1"), torch.zeros_like),
    ]
    assert model.support("resid_mid.1").writable
    (clean,) = model.run([Request(TOKENS, return_logits=True)])
    hooks = hook_count(model.module)
    for edit, change in cells:
        middle, logits = by_hand(family, change)
        for points in (["resid_mid.1"], ["resid_mid.1", "resid_pre.1", "attn_out_post.1", "mlp_out.1"]):
            (result,) = model.run([Request(TOKENS, capture=points, edits=[edit], return_logits=True)])
            assert torch.allclose(result.capture["resid_mid.1"], middle, rtol=0, atol=1e-13), edit
            assert result.logits is not None and clean.logits is not None
            assert (result.logits - logits).abs().max() <= 1e-11 * (1 + logits.abs().max()), edit
            assert (result.logits - clean.logits).abs().max() > 1e-3
    (again,) = model.run([Request(TOKENS, return_logits=True)])
    assert torch.equal(again.logits, clean.logits) and hook_count(model.module) == hooks  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_the_contribution_shows_its_own_value_and_its_edits_come_first(family: str) -> None:
    model, v, w = engine(family), some(48), some(48).flip(0)
    points = ["resid_pre.1", "attn_out_post.1", "resid_mid.1", "mlp_out_post.1", "resid_post.1"]
    (clean,) = model.run([Request(TOKENS, capture=points)])
    (result,) = model.run([Request(TOKENS, capture=points, edits=[Add("resid_mid.1", v)])])
    assert torch.equal(result.capture["attn_out_post.1"], clean.capture["attn_out_post.1"])
    got = result.capture
    assert torch.allclose(got["resid_mid.1"] + got["mlp_out_post.1"], got["resid_post.1"], rtol=0, atol=1e-12)

    both = [Scale("resid_mid.1", 2.0), Add("attn_out_post.1", w), Add("resid_mid.1", v)]
    (result,) = model.run([Request(TOKENS, capture=points, edits=both)])
    assert torch.allclose(result.capture["attn_out_post.1"], clean.capture["attn_out_post.1"] + w, rtol=0, atol=1e-14)
    right = 2.0 * (clean.capture["resid_mid.1"] + w) + v
    assert torch.allclose(result.capture["resid_mid.1"], right, rtol=0, atol=1e-13)

    earlier = [Add("resid_pre.1", w), Replace("resid_mid.1", v)]
    (result,) = model.run([Request(TOKENS, capture=points, edits=earlier)])
    assert torch.allclose(result.capture["resid_mid.1"], v.expand(7, -1), rtol=0, atol=1e-13)
    assert torch.equal(result.capture["resid_pre.1"], clean.capture["resid_pre.1"] + w)


@pytest.mark.parametrize("family", ["llama", "granite", "gpt2", "opt"])
def test_prompts_beside_an_edited_one_keep_their_bits(family: str) -> None:
    model = engine(family, torch.bfloat16)
    points = ["resid_mid.1", "resid_post.2", "attn_out_post.1"]
    requests = [Request(PROMPTS[1], capture=points), Request(PROMPTS[1], capture=points), Request(PROMPTS[0])]
    clean = model.run(requests)
    edits = [Add("resid_mid.1", some(48)), Add("attn_out_post.1", some(48))]
    edited = model.run([requests[0], replace(requests[1], edits=edits), requests[2]])
    for point in points:
        assert torch.equal(edited[0].capture[point], clean[0].capture[point])
        assert not torch.allclose(edited[1].capture[point], clean[1].capture[point])


def test_while_generating_every_cached_step_is_edited() -> None:
    model, v = engine("llama"), some(48)
    request = Request(TOKENS, edits=[Add("resid_mid.1", v, scale=3.0)], max_new_tokens=5, return_logits=True)
    (result,) = model.run([request])
    (full,) = model.run([replace(request, tokens=result.tokens[:-1], max_new_tokens=0)])
    assert result.logits is not None and full.logits is not None
    assert torch.allclose(result.logits, full.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["normed", "weighed"])
def test_a_stream_that_is_normed_or_weighed_before_it_refuses_the_write(kind: str) -> None:
    model = unseen(kind)
    assert model.support("resid_mid.1").readable and not model.support("resid_mid.1").writable
    with pytest.raises(PointRefused, match=r"resid_mid\.1 can be read but not written.*Nearest: attn_out_post\.1"):
        model.run([Request([5, 7], edits=[Ablate("resid_mid.1")])])
    assert unseen("sandwich").support("resid_mid.1").writable


@pytest.mark.parametrize("point", ["attn_out_post", "resid_pre"])
def test_where_a_proof_took_an_addend_away_the_sum_is_not_written(point: str) -> None:
    sound = engine("llama")
    anatomy = replace(sound.anatomy, refused={Address(point, 1): Refusal("its equation fails")})
    model = EagerEngine(sound.module, None, anatomy, sound.model)
    assert model.support("resid_mid.1").readable and not model.support("resid_mid.1").writable
    assert model.support("resid_mid.0").writable
