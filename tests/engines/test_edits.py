"""An edit equals a forward pass in which a plain hook made the same change by hand, and shows where it should."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.edits import Ablate, Add, Call, Cap, Edit, Project, Reconstruct, Replace, Scale, SetFeature, Swap
from interp.engines.base import Request
from tests.families.loaded import F64, PROMPTS, engine, hook_count, readable, writable
from tests.families.tiny import SPLIT_LLAMAS

TOKENS = [11, 64, 2, 130, 5, 5, 88]
Change = Callable[[Tensor], Tensor]

BY_HAND: dict[str, dict[str, tuple[str, str, float]]] = {
    "llama": {
        "resid_pre": ("model.layers.1", "input", 1.0),
        "attn_in": ("model.layers.1.self_attn", "input", 1.0),
        "query": ("model.layers.1.self_attn.q_proj", "output", 1.0),
        "key": ("model.layers.1.self_attn.k_proj", "output", 1.0),
        "value": ("model.layers.1.self_attn.v_proj", "output", 1.0),
        "z": ("model.layers.1.self_attn.o_proj", "input", 1.0),
        "attn_out_post": ("model.layers.1.self_attn", "output", 1.0),
        "mlp_in": ("model.layers.1.mlp", "input", 1.0),
        "mlp_pre": ("model.layers.1.mlp.gate_proj", "output", 1.0),
        "mlp_pre_linear": ("model.layers.1.mlp.up_proj", "output", 1.0),
        "mlp_act": ("model.layers.1.mlp.down_proj", "input", 1.0),
        "mlp_out": ("model.layers.1.mlp", "output", 1.0),
        "resid_post": ("model.layers.1", "output", 1.0),
    },
    "gemma3": {
        "q_norm_in": ("model.layers.1.self_attn.q_norm", "input", 1.0),
        "k_norm_out": ("model.layers.1.self_attn.k_norm", "output", 1.0),
        "attn_out": ("model.layers.1.self_attn", "output", 1.0),
        "attn_out_post": ("model.layers.1.post_attention_layernorm", "output", 1.0),
        "mlp_out": ("model.layers.1.mlp", "output", 1.0),
        "mlp_out_post": ("model.layers.1.post_feedforward_layernorm", "output", 1.0),
    },
    "granite": {
        "attn_out_post": ("model.layers.1.self_attn", "output", 0.22),
        "mlp_out_post": ("model.layers.1.mlp", "output", 0.22),
        "mlp_out": ("model.layers.1.mlp", "output", 1.0),
    },
    "gpt2": {
        "resid_pre": ("transformer.h.1", "input", 1.0),
        "attn_in": ("transformer.h.1.attn", "input", 1.0),
        "mlp_out_post": ("transformer.h.1.mlp", "output", 1.0),
        "mlp_act": ("transformer.h.1.mlp.c_proj", "input", 1.0),
    },
    "gpt_neox_parallel": {
        "attn_out_post": ("gpt_neox.layers.1.attention", "output", 1.0),
        "mlp_in": ("gpt_neox.layers.1.mlp", "input", 1.0),
        "mlp_out_post": ("gpt_neox.layers.1.mlp", "output", 1.0),
    },
    "bloom": {"attn_out_post": ("transformer.h.1.self_attention.dense", "output", 1.0)},
    "mpt": {"attn_out_post": ("transformer.blocks.1.attn.out_proj", "output", 1.0)},
    "falcon": {"mlp_out_post": ("transformer.h.1.mlp", "output", 1.0)},
    "split_llama": {
        "resid_pre": ("layers_last.0", "input", 1.0),
        "attn_out_post": ("layers_last.0.self_attn", "output", 1.0),
        "z": ("layers_last.0.self_attn.o_proj", "input", 1.0),
        "mlp_act": ("layers_last.0.mlp.down_proj", "input", 1.0),
        "resid_post": ("layers_last.0", "output", 1.0),
    },
    "split_llama_mlp": {"resid_pre": ("adapter", "output", 1.0)},
}
"""Point -> module, side, and the factor between that module's tensor and the point."""
MANY = [*BY_HAND, "gemma2", "olmo2", "glm4", "phi3", "qwen3_moe", "opt", "cohere2"]
NINE = ["llama", "gemma2", "granite", "gpt2", "bloom", "mpt", "falcon", "olmo2", "glm4"]
CELLS = [(family, point) for family, points in BY_HAND.items() for point in points]


def hand_written(family: str, point: str, change: Change) -> Tensor:
    """Logits of a forward pass whose tensor at `point` a hook has changed."""
    model: Any = engine(family).module
    path, side, factor = BY_HAND[family][point]

    def new(x: Tensor) -> Tensor:
        return (change(x * factor) / factor).reshape(x.shape)

    def after(m: Any, a: tuple, output: Any) -> Any:
        return new(output) if isinstance(output, Tensor) else (new(output[0]), *output[1:])

    def before(m: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (new(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": new(kwargs["hidden_states"])}

    module = model.get_submodule(path)
    handle = (
        module.register_forward_pre_hook(before, with_kwargs=True)
        if side == "input"
        else module.register_forward_hook(after)
    )
    with torch.no_grad(), engine(family).numerics():
        logits = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    handle.remove()
    return logits


def edited(family: str, edits: Sequence[Edit], tokens: Sequence[int] = TOKENS) -> Tensor:
    (result,) = engine(family).run([Request(tokens, edits=edits, return_logits=True)])
    assert result.logits is not None
    return result.logits


def vector(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(4), dtype=F64)


def width(family: str, point: str) -> int:
    (result,) = engine(family).run([Request([1], capture=[f"{point}.1"])])
    return result.capture[f"{point}.1"].shape[-1]


def part(x: Tensor, v: Tensor) -> Tensor:
    """The component of x along v."""
    return (x @ (v / v.norm()))[..., None]


def along(x: Tensor, v: Tensor) -> Tensor:
    """The share of x that is parallel to v."""
    return part(x, v) * (v / v.norm())


class Coder:
    """A dictionary with a latent more than channels."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.into = torch.randn(n, n + 1, generator=generator, dtype=F64)
        self.out = torch.randn(n + 1, n, generator=generator, dtype=F64)

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.into + 0.2).relu()

    def decode(self, z: Tensor) -> Tensor:
        return z @ self.out


def by_width(function: Change, n: int) -> Change:
    """The same change whether or not the module's tensor has its heads as an axis."""
    return lambda x: function(x.reshape(*x.shape[:2], -1, n) if x.ndim == 3 else x)


@pytest.mark.parametrize(("family", "point"), CELLS)
def test_each_edit_equals_a_hand_written_forward(family: str, point: str) -> None:
    n, at = width(family, point), f"{point}.1"
    v, coder = vector(n), Coder(n)
    cells: list[tuple[Edit, Change]] = [
        (Add(at, v, scale=2.5), lambda x: x + 2.5 * v),
        (Scale(at, -0.5), lambda x: x * -0.5),
        (Replace(at, v), lambda x: v.expand_as(x)),
        (Ablate(at), torch.zeros_like),
        (Ablate(at, "mean"), lambda x: x.mean(x.shape.index(len(TOKENS)), keepdim=True).expand_as(x)),
        (Ablate(at, v), lambda x: v.expand_as(x)),
        (Project(at, v, keep=0.3), lambda x: x - 0.7 * along(x, v)),
        (Cap(at, v, 0.05, min=-0.02), lambda x: x - along(x, v) + part(x, v).clamp(-0.02, 0.05) * (v / v.norm())),
        (Swap(at, v, v.flip(0)), lambda x: x - 2 * along(x, v / v.norm() - v.flip(0) / v.norm())),
        (Call(at, torch.sin), torch.sin),
        (Reconstruct(at, at, coder), lambda x: coder.decode(coder.encode(x))),
        (SetFeature(at, coder, 2, delta=1.5), lambda x: x + 1.5 * coder.out[2]),
        (SetFeature(at, coder, 2, value=0.7), lambda x: x + (0.7 - coder.encode(x)[..., 2:3]) * coder.out[2]),
    ]
    clean = edited(family, [])
    for edit, change in cells:
        right = hand_written(family, point, by_width(change, n))
        found = edited(family, [edit])
        assert (found - right).abs().max() <= 1e-12 * (1 + right.abs().max()), edit
        if not (point == "query" and family == "llama" and edit == Ablate(at)):
            assert (found - clean).abs().max() > 1e-6, edit
    assert torch.equal(edited(family, []), clean)


@pytest.mark.parametrize("family", MANY)
def test_every_writable_point_reads_back_what_is_written_and_moves_the_logits(family: str) -> None:
    model = engine(family)
    (clean,) = model.run([Request(TOKENS, capture=readable(model), return_logits=True)])
    hooks = hook_count(model.module)
    assert len(writable(model)) >= 10
    for at in writable(model):
        v = clean.capture[at] * 0.7 + 0.3
        (result,) = model.run(
            [Request(TOKENS, capture=[at], edits=[Replace(at, v, positions=(2, 6))], return_logits=True)]
        )
        right = clean.capture[at].clone()
        right[[2, 6]] = v[[2, 6]]
        assert torch.allclose(result.capture[at], right, rtol=0, atol=1e-14), at
        assert result.logits is not None and clean.logits is not None
        assert (result.logits[6] - clean.logits[6]).abs().max() > 1e-9, at
        # causality: nothing before position 2 moves, beyond the rounding of experts that get other tokens' company
        assert torch.allclose(result.logits[:2], clean.logits[:2], rtol=0, atol=1e-13), at
    assert hook_count(model.module) == hooks


@pytest.mark.parametrize("family", [*NINE, *SPLIT_LLAMAS])
def test_a_changed_contribution_moves_the_next_sum_once(family: str) -> None:
    model, v = engine(family), vector(48)
    for name in ("attn_out_post.1", "mlp_out_post.1"):
        points = ["resid_pre.1", "attn_out_post.1", "mlp_out_post.1", "resid_post.1"]
        (result,) = model.run([Request(TOKENS, capture=points, edits=[Add(name, v)])])
        got = result.capture
        total = got["resid_pre.1"] + got["attn_out_post.1"] + got["mlp_out_post.1"]
        assert torch.allclose(total, got["resid_post.1"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "split_llama"])
def test_points_that_share_a_tensor_are_edited_in_the_order_of_the_forward_pass(family: str) -> None:
    """mlp_out and mlp_out_post are one tensor here: the earlier name shows at the later one, in any order."""
    model, v = engine(family), vector(48)
    (clean,) = model.run([Request(TOKENS, capture=["mlp_out.1"])])
    for points in (["mlp_out.1", "mlp_out_post.1"], ["mlp_out_post.1", "mlp_out.1"]):
        (first,) = model.run([Request(TOKENS, capture=points, edits=[Add("mlp_out.1", v)])])
        assert torch.equal(first.capture["mlp_out.1"], clean.capture["mlp_out.1"] + v)
        assert torch.equal(first.capture["mlp_out_post.1"], first.capture["mlp_out.1"])
        (second,) = model.run([Request(TOKENS, capture=points, edits=[Add("mlp_out_post.1", v)])])
        assert torch.equal(second.capture["mlp_out.1"], clean.capture["mlp_out.1"])
        assert torch.equal(second.capture["mlp_out_post.1"], clean.capture["mlp_out.1"] + v)
    both = [Add("mlp_out_post.1", v), Ablate("mlp_out.1")]
    for edits in (both, both[::-1]):
        (result,) = model.run([Request(TOKENS, capture=["mlp_out_post.1"], edits=edits)])
        assert torch.equal(result.capture["mlp_out_post.1"], v.expand(7, -1))


def test_a_write_at_z_shows_in_head_out() -> None:
    (result,) = engine("llama").run([Request(TOKENS, capture=["head_out.1", "z.1"], edits=[Ablate("z.1.head-2")])])
    assert (result.capture["head_out.1"][:, 2] == 0).all() and (result.capture["z.1"][:, 2] == 0).all()
    assert result.capture["head_out.1"][:, [0, 1, 3, 4, 5]].abs().min() > 0


def test_edits_at_one_point_apply_in_the_order_given() -> None:
    v, at = vector(48), "resid_post.0"
    model = engine("llama")
    (a,) = model.run([Request(TOKENS, capture=[at], edits=[Ablate(at), Add(at, v)])])
    (b,) = model.run([Request(TOKENS, capture=[at], edits=[Add(at, v), Ablate(at)])])
    assert torch.equal(a.capture[at], v.expand(7, -1)) and (b.capture[at] == 0).all()


def test_unequal_prompts_each_carry_their_own_edits() -> None:
    """A per-position replacement of one prompt must not meet the padding of another."""
    for family in ("llama", "gpt2", "gemma3", "split_llama"):
        model = engine(family)
        rows = torch.randn(7, 48, generator=torch.Generator().manual_seed(1), dtype=F64)
        early = rows[0, : model.model.width(0)]
        head = Replace("value.1.head-1", rows[0, : model.model.d_head])
        requests = [
            Request(PROMPTS[0], edits=[Replace("resid_post.1", rows[:3])], return_logits=True),
            Request(PROMPTS[1], edits=[Add("mlp_out.0", early, positions=(1, 6))], return_logits=True),
            Request(PROMPTS[2], edits=[Scale("attn_out.2", 3.0), head], return_logits=True),
            Request(PROMPTS[0], return_logits=True),
        ]
        for request, result in zip(requests, model.run(requests), strict=True):
            (alone,) = model.run([request])
            assert result.logits is not None and alone.logits is not None
            assert torch.allclose(result.logits, alone.logits, rtol=0, atol=1e-12)
