"""Captured tensors equal those of plain hooks bit for bit, are copies, and do not depend on what else is asked."""

import random

import pytest
import torch
from torch import Tensor, nn

from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from tests.families.loaded import F32, PROMPTS, engine, hook_count, readable
from tests.families.tiny import N_LAYERS

TOKENS = [11, 64, 2, 130, 5, 5, 88]


def by_hand(model: nn.Module, wanted: dict[str, tuple[str, str]], tokens: list[int]) -> dict[str, Tensor]:
    """Clones taken by hooks on modules named here; `wanted` gives point -> (module path, input or output)."""
    found: dict[str, Tensor] = {}
    handles = []
    for point, (path, side) in wanted.items():
        module = model.get_submodule(path)

        def after(m: nn.Module, a: tuple, output: object, point: str = point) -> None:
            found[point] = (output if isinstance(output, Tensor) else output[0]).clone()[0]  # type: ignore[index]

        def before(m: nn.Module, args: tuple, kwargs: dict, point: str = point) -> None:
            found[point] = (args[0] if args else kwargs["hidden_states"]).clone()[0]

        if side == "input":
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


LLAMA = {
    "resid_pre": ("model.layers.{l}", "input"),
    "attn_in": ("model.layers.{l}.self_attn", "input"),
    "attn_out": ("model.layers.{l}.self_attn", "output"),
    "attn_out_post": ("model.layers.{l}.self_attn", "output"),
    "resid_mid": ("model.layers.{l}.post_attention_layernorm", "input"),
    "mlp_in": ("model.layers.{l}.mlp", "input"),
    "mlp_pre": ("model.layers.{l}.mlp.gate_proj", "output"),
    "mlp_pre_linear": ("model.layers.{l}.mlp.up_proj", "output"),
    "mlp_act": ("model.layers.{l}.mlp.down_proj", "input"),
    "mlp_out": ("model.layers.{l}.mlp", "output"),
    "mlp_out_post": ("model.layers.{l}.mlp", "output"),
    "resid_post": ("model.layers.{l}", "output"),
    "final_norm": ("model.norm", "output"),
    "embeddings": ("model.embed_tokens", "output"),
    "lm_head": ("lm_head", "output"),
}
SANDWICH = LLAMA | {
    "attn_out_post": ("model.layers.{l}.post_attention_layernorm", "output"),
    "resid_mid": ("model.layers.{l}.pre_feedforward_layernorm", "input"),
    "mlp_out_post": ("model.layers.{l}.post_feedforward_layernorm", "output"),
}
OLMO2 = {k: v for k, v in SANDWICH.items() if k != "resid_mid"} | {"resid_mid": ("model.layers.{l}.mlp", "input")}
NEOX = {
    "resid_pre": ("gpt_neox.layers.{l}", "input"),
    "attn_in": ("gpt_neox.layers.{l}.attention", "input"),
    "attn_out": ("gpt_neox.layers.{l}.attention", "output"),
    "mlp_in": ("gpt_neox.layers.{l}.mlp", "input"),
    "mlp_out": ("gpt_neox.layers.{l}.mlp", "output"),
    "mlp_pre": ("gpt_neox.layers.{l}.mlp.dense_h_to_4h", "output"),
    "resid_post": ("gpt_neox.layers.{l}", "output"),
}
GPT2 = {
    "resid_pre": ("transformer.h.{l}", "input"),
    "attn_in": ("transformer.h.{l}.attn", "input"),
    "attn_out_post": ("transformer.h.{l}.attn", "output"),
    "resid_mid": ("transformer.h.{l}.ln_2", "input"),
    "mlp_out": ("transformer.h.{l}.mlp", "output"),
    "mlp_act": ("transformer.h.{l}.mlp.c_proj", "input"),
    "resid_post": ("transformer.h.{l}", "output"),
    "embeddings": ("transformer.wte", "output"),
}
SPLIT = {
    point: (path.replace("model.layers.{l}", "{block}").removeprefix("model."), side)
    for point, (path, side) in LLAMA.items()
} | {"adapter_out": ("adapter", "output")}
BLOCKS = ("layers_first.0", "layers_last.0", "layers_last.1")
MODULES = {
    "split_llama": SPLIT,
    "split_llama_mlp": SPLIT,
    "llama": LLAMA,
    "qwen3": LLAMA,
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "olmo2": OLMO2,
    "gpt2": GPT2,
    "gpt_neox_parallel": NEOX,
    "gpt_neox_sequential": NEOX,
}


@pytest.mark.parametrize("family", MODULES)
def test_captures_equal_plain_hooks_bit_for_bit(family: str) -> None:
    wanted = {
        (f"{point}.{layer}" if "{" in path else point): (path.format(l=layer, block=BLOCKS[layer]), side)
        for point, (path, side) in MODULES[family].items()
        for layer in range(N_LAYERS)
    }
    right = by_hand(engine(family, F32).module, wanted, TOKENS)
    (result,) = engine(family, F32).run([Request(TOKENS, capture=list(wanted))])
    assert len(result.capture) == len(wanted)
    for address, tensor in right.items():
        assert torch.equal(result.capture[address], tensor), address


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon", "gpt2", "granite", "split_llama_mlp"])
def test_one_point_alone_equals_all_together_in_any_order(family: str) -> None:
    model = engine(family, F32)
    points = readable(model)
    (together,) = model.run([Request(TOKENS, capture=points)])
    shuffled = random.Random(0).sample(points, len(points))
    (reordered,) = model.run([Request(TOKENS, capture=shuffled)])
    for point in points:
        assert torch.equal(reordered.capture[point], together.capture[point]), point
    for point in random.Random(1).sample(points, 25):
        (alone,) = model.run([Request(TOKENS, capture=[point])])
        assert torch.equal(alone.capture[point], together.capture[point]), point


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon", "gpt_neox_parallel", "split_llama"])
def test_captures_never_change_and_share_no_memory(family: str) -> None:
    model = engine(family, F32)
    points = readable(model, matrices=True)
    (result,) = model.run([Request(TOKENS, capture=points, return_logits=True)])
    before = {point: result.capture[point].clone() for point in points}
    model.run([Request([1, 2, 3], capture=points)])
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.module.parameters()}
    for point in points:
        assert torch.equal(
            result.capture[point],
            before[point],
        ), point
        assert result.capture[point].untyped_storage().data_ptr() not in owned
    storages = [result.capture[point].untyped_storage().data_ptr() for point in points]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("family", ["llama", "falcon", "split_llama"])
def test_warm_equals_cold_and_no_hook_stays(family: str) -> None:
    model = engine(family, F32)
    points, hooks = readable(model, matrices=True), hook_count(engine(family, F32).module)
    request = Request(TOKENS, capture=points, return_logits=True)
    (cold,) = model.run([request])
    model.run([Request([3, 1], capture=points[:5], max_new_tokens=0)])
    (warm,) = model.run([request])
    assert hook_count(model.module) == hooks
    assert cold.logits is not None and warm.logits is not None and torch.equal(cold.logits, warm.logits)
    assert all(torch.equal(cold.capture[point], warm.capture[point]) for point in points)


def test_observing_changes_no_logit() -> None:
    for family in ("llama", "gemma3", "gpt2", "falcon", "split_llama"):
        model = engine(family, F32)
        with torch.no_grad():
            right = model.module(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
        for points in ([], readable(model)):
            (result,) = model.run([Request(TOKENS, capture=points, return_logits=True)])
            assert result.logits is not None and torch.equal(result.logits, right)


def test_shapes_are_the_fields() -> None:
    model = engine("llama", F32)
    n, info = len(TOKENS), model.model
    heads, kv = (info.n_heads, info.d_head), (info.n_kv_heads, info.d_head)
    assert (heads, kv) == ((6, 10), (2, 10))
    right = {
        "resid_pre.0": (n, info.d_model),
        "query.0": (n, *heads),
        "key.0": (n, *kv),
        "value.0": (n, *kv),
        "query_rot.0": (n, *heads),
        "key_rot.0": (n, *kv),
        "z.0": (n, *heads),
        "z.0.head-3": (n, info.d_head),
        "head_out.0": (n, info.n_heads, info.d_model),
        "attn_probs.0": (info.n_heads, n, n),
        "attn_scores.0.head-5": (n, n),
        "mlp_act.0": (n, info.d_mlp),
        "mlp_norm_scale.0": (n, 1),
        "logits": (n, info.d_vocab),
    }
    (result,) = model.run([Request(TOKENS, capture=list(right))])
    assert {str(a): tuple(t.shape) for a, t in result.capture.items()} == right
    cache = run_with_cache(model, torch.tensor([TOKENS, TOKENS]), list(right))
    assert {str(a): tuple(t.shape) for a, t in cache.items()} == {a: (2, *shape) for a, shape in right.items()}


def test_provenance_names_module_side_and_transform() -> None:
    (result,) = engine("granite", F32).run([Request(list(PROMPTS[0]), capture=["mlp_out_post.2", "mlp_in.0"])])
    sources = {str(address): source for address, source in result.provenance.sources.items()}
    assert sources["mlp_out_post.2"].module == "model.layers.2.mlp"
    assert (sources["mlp_out_post.2"].side, sources["mlp_out_post.2"].transform) == ("output", "times 0.22")
    assert (sources["mlp_in.0"].module, sources["mlp_in.0"].side) == ("model.layers.0.mlp", "input")
    assert result.provenance.dtype == "float32" and result.provenance.attention == "sdpa"
