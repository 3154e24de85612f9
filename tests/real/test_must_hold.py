"""What must hold on real weights, against plain transformers with hooks written by hand for each family."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from interp.engines.doctor import prove
from interp.engines.eager import EagerEngine
from interp.models.checkpoint import resolve
from interp.points import Address
from interp.points.table import BLOCK_POINTS

from .conftest import GEMMA, SMOLLM

pytestmark = pytest.mark.real

Hooks = dict[str, tuple[str, str]]
"""Point → module below the block (empty for the block itself) and which side of it."""
SEQUENTIAL: Hooks = {
    "resid_pre": ("", "input"),
    "attn_in": ("self_attn", "input"),
    "attn_out": ("self_attn", "output"),
    "mlp_in": ("mlp", "input"),
    "mlp_out": ("mlp", "output"),
    "resid_post": ("", "output"),
}
BY_HAND: dict[str, Hooks] = {
    GEMMA: SEQUENTIAL
    | {
        "attn_out_post": ("post_attention_layernorm", "output"),
        "resid_mid": ("pre_feedforward_layernorm", "input"),
        "mlp_out_post": ("post_feedforward_layernorm", "output"),
    },
    SMOLLM: SEQUENTIAL
    | {
        "attn_out_post": ("self_attn", "output"),
        "resid_mid": ("post_attention_layernorm", "input"),
        "mlp_out_post": ("mlp", "output"),
    },
}
NORMALIZED: dict[str, dict[str, str]] = {
    GEMMA: {
        "attn_normalized": "input_layernorm",
        "attn_post_normalized": "post_attention_layernorm",
        "mlp_normalized": "pre_feedforward_layernorm",
        "mlp_post_normalized": "post_feedforward_layernorm",
    },
    SMOLLM: {"attn_normalized": "input_layernorm", "mlp_normalized": "post_attention_layernorm"},
}
"""x/scale exists inside a norm only: written out from what that norm receives."""
BOUND = 2e-5
"""Largest difference between a padded and a lone prompt, of a position's norm; measured 5.4e-6 on Gemma, 2.9e-6 on
SmolLM2, over all layers and points."""

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    return",
    "In the beginning God created the heaven and the earth. And the earth was without form, and",
    "2 + 2 =",
]


@pytest.fixture(scope="module")
def plain(engine: EagerEngine) -> Any:
    """The checkpoint as transformers alone loads it."""
    found = resolve(engine.model.name, lambda line: None)
    return AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def by_hand(engine: EagerEngine, plain: Any, tokens: Tensor) -> Iterator[dict[Address, Tensor]]:
    """Every block-level tensor of every layer of one plain forward pass."""
    seen: dict[Address, Tensor] = {}

    def keep(address: Address) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[address] = (args[0] if args else kwargs["hidden_states"]).clone()

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen[address] = (output[0] if isinstance(output, tuple) else output).clone()

        return before, after

    def keep_normalized(address: Address) -> Callable[..., None]:
        def before(module: Any, args: tuple[Tensor, ...]) -> None:
            (x,) = args
            epsilon = module.eps if engine.model.name == GEMMA else module.variance_epsilon
            seen[address] = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

        return before

    handles = []
    for layer, block in enumerate(plain.model.layers):
        for point, (path, side) in BY_HAND[engine.model.name].items():
            module, (before, after) = block.get_submodule(path), keep(Address(point, layer))
            if side == "input":
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(after))
        for point, path in NORMALIZED[engine.model.name].items():
            hook = keep_normalized(Address(point, layer))
            handles.append(block.get_submodule(path).register_forward_pre_hook(hook))
    plain(input_ids=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    yield seen
    seen.clear()


@pytest.fixture(scope="module")
def tokens(engine: EagerEngine) -> Tensor:
    """8 prompts of 64 tokens."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, engine.model.d_vocab, (8, 64), generator=generator)


@pytest.fixture(scope="module")
def cache(engine: EagerEngine, tokens: Tensor, by_hand: dict[Address, Tensor]) -> Any:
    return run_with_cache(engine, tokens, list(by_hand))


def test_every_block_level_point_that_is_served_is_compared(engine: EagerEngine) -> None:
    served = {
        point
        for point in BLOCK_POINTS
        for layer in range(engine.model.n_layers)
        if engine.support(Address(point, layer)).readable
    }
    assert served == set(BY_HAND[engine.model.name]) | set(NORMALIZED[engine.model.name])


def test_captures_equal_those_of_plain_hooks_bit_for_bit(
    engine: EagerEngine, by_hand: dict[Address, Tensor], cache: Any
) -> None:
    assert len(by_hand) == engine.model.n_layers * len(BY_HAND[engine.model.name] | NORMALIZED[engine.model.name])
    different = [str(address) for address, tensor in by_hand.items() if not torch.equal(cache[address], tensor)]
    assert not different
    shapes = {tuple(tensor.shape) for tensor in cache.values()}
    assert shapes == {(8, 64, engine.model.d_model)}


def test_logits_equal_those_of_plain_transformers_bit_for_bit(engine: EagerEngine, plain: Any, tokens: Tensor) -> None:
    logits = run_with_cache(engine, tokens[:2], ["logits"])[Address("logits")]
    assert torch.equal(logits, plain(input_ids=tokens[:2], use_cache=False).logits)


def test_greedy_continuations_are_those_of_transformers_with_and_without_capture(
    engine: EagerEngine, plain: Any
) -> None:
    every = [Address(point, layer) for point in BY_HAND[engine.model.name] for layer in range(engine.model.n_layers)]
    for prompt in PROMPTS[:2]:
        (bare,) = engine.run([Request(prompt, max_new_tokens=20)])
        (watched,) = engine.run([Request(prompt, capture=every, max_new_tokens=20)])
        ids = engine.to_tokens(prompt)
        expected = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
        assert bare.tokens == watched.tokens == expected[0].tolist()
        assert len(bare.tokens) == ids.shape[1] + 20 and len(watched.capture["resid_post.0"]) == len(bare.tokens) - 1


def test_a_batch_continues_each_prompt_as_if_it_were_alone(engine: EagerEngine) -> None:
    together = engine.run([Request(prompt, max_new_tokens=8) for prompt in PROMPTS])
    alone = [engine.run([Request(prompt, max_new_tokens=8)])[0] for prompt in PROMPTS]
    assert [result.tokens for result in together] == [result.tokens for result in alone]


def test_a_padded_batch_agrees_with_each_prompt_alone(engine: EagerEngine) -> None:
    """Other shapes make other summation orders in the matrix products: equal within rounding, in norm per position."""
    every = [Address(point, layer) for point in BY_HAND[engine.model.name] for layer in range(engine.model.n_layers)]
    together = engine.run([Request(prompt, capture=every) for prompt in PROMPTS])
    assert len({result.n_prompt for result in together}) > 2
    worst = 0.0
    for prompt, result in zip(PROMPTS, together, strict=True):
        (alone,) = engine.run([Request(prompt, capture=every)])
        for address in every:
            ours, theirs = result.capture[address].double(), alone.capture[address].double()
            assert ours.shape == theirs.shape
            worst = max(worst, float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max()))
    assert worst < BOUND, f"padded against alone: {worst:.2e} of a position's norm"


def test_every_proof_holds(engine: EagerEngine) -> None:
    claims = prove(engine)
    assert {claim.proof for claim in claims} == {"P1", "P2", "P3", "P4", "P5", "P6", "P8"}
    assert [claim for claim in claims if not claim.holds] == []
    layers = {claim.layer for claim in claims if claim.proof == "P1"}
    assert layers == set(range(engine.model.n_layers)) and not engine.anatomy.refused


def test_gemma_adds_something_else_than_its_mlp_returns(gemma: EagerEngine) -> None:
    """The trap: one shape, two tensors."""
    points = [f"{name}.{layer}" for layer in (0, 9, 17) for name in ("mlp_out", "mlp_out_post")]
    prompt = "The raw output of an MLP is not always what is added to the residual stream."
    (result,) = gemma.run([Request(prompt, capture=points)])
    for layer in (0, 9, 17):
        raw, added = result.capture[f"mlp_out.{layer}"], result.capture[f"mlp_out_post.{layer}"]
        assert raw.shape == added.shape
        assert 0.1 < float(torch.cosine_similarity(raw.flatten(), added.flatten(), dim=0)) < 0.6


def test_smollm_adds_what_its_sublayers_return(smollm: EagerEngine) -> None:
    for part in ("attn", "mlp"):
        layers = range(smollm.model.n_layers)
        points = [Address(name, layer) for layer in layers for name in (f"{part}_out", f"{part}_out_post")]
        (result,) = smollm.run([Request("Without a norm behind it", capture=points)])
        for layer in layers:
            raw, added = result.capture[f"{part}_out.{layer}"], result.capture[f"{part}_out_post.{layer}"]
            assert torch.equal(raw, added)
