"""Modules that are no classes of transformers are read, edited and proven like any other."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from interp.edits import Add, Replace
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from interp.engines.load import wrap
from interp.errors import InterpError, PointRefused, UserError
from interp.models.calling import calling_of
from interp.models.probe import output_tensors
from interp.models.rerun import pick, put
from tests.engines.own_modules import (
    D_HEAD,
    D_MLP,
    D_MODEL,
    D_VOCAB,
    N_CTX,
    N_HEADS,
    N_LAYERS,
    TorchBlock,
    own_model,
)
from tests.families.loaded import hook_count, readable

PROMPTS = ([7, 3, 9], [11, 60, 2, 30, 5, 5], [40])


class Named(NamedTuple):
    loss: None
    logits: Tensor


@dataclass
class Held:
    logits: Tensor


OUTPUTS: list[Callable[[Tensor], Any]] = [
    lambda logits: logits,
    lambda logits: {"logits": logits},
    lambda logits: (logits, None),
    lambda logits: Named(None, logits),
    Held,
    lambda logits: types.SimpleNamespace(logits=logits),
]


def test_a_hand_written_model_is_resolved_from_its_data_flow() -> None:
    engine = wrap(own_model())
    model = engine.model
    assert (model.n_layers, model.d_model, model.d_vocab, model.n_ctx) == (N_LAYERS, D_MODEL, D_VOCAB, None)
    assert (model.n_heads, model.n_kv_heads, model.d_head, model.d_mlp) == (N_HEADS, N_HEADS, D_HEAD, D_MLP)
    expected = (
        "resid_pre.1 query.1 key.1 value.1 attn_scores.1 attn_probs.1 z.1 head_out.1 resid_mid.1 mlp_act.1 final_norm"
    )
    assert set(expected.split()) <= set(readable(engine, matrices=True, layers=[1])) and not engine.anatomy.refused


def test_what_is_captured_is_what_the_modules_of_the_model_compute() -> None:
    model = own_model()
    x = model.tokens(torch.tensor([PROMPTS[1]])) + model.positions.weight[: len(PROMPTS[1])]
    expected: dict[str, Tensor] = {}
    for layer, block in enumerate(model.blocks):
        expected[f"resid_pre.{layer}"] = x
        expected[f"attn_out_post.{layer}"] = block.attention(block.norm1(x))  # type: ignore[operator]
        x = expected[f"resid_mid.{layer}"] = x + expected[f"attn_out_post.{layer}"]
        expected[f"mlp_act.{layer}"] = block.mlp[1](block.mlp[0](block.norm2(x)))  # type: ignore[index, operator]
        x = x + block.mlp(block.norm2(x))  # type: ignore[operator]
    expected["logits"] = model.head(model.norm(x))
    engine = wrap(model)
    result = engine.run([Request(PROMPTS[1], list(expected))])[0]
    for address, tensor in expected.items():
        assert torch.equal(result.capture[address], tensor[0]), address
    assert torch.allclose(engine.unembed(x), expected["logits"], rtol=1e-13)


@pytest.mark.parametrize("wrap_up", OUTPUTS)
def test_logits_come_as_a_tensor_or_inside_something(wrap_up: Callable[[Tensor], Any]) -> None:
    engine, plain = wrap(own_model(wrap_up=wrap_up), prove=False), wrap(own_model(), prove=False)
    vector = torch.randn(D_VOCAB, dtype=torch.float64)
    for edits in ((), (Add("resid_post.0", vector[:D_MODEL]), Add("lm_head", vector))):
        a, b = (e.run([Request(PROMPTS[0], ["logits"], edits, return_logits=True)])[0] for e in (engine, plain))
        assert torch.equal(a.capture["logits"], b.capture["logits"])
        assert a.logits is not None and torch.equal(a.logits, a.capture["logits"])


@pytest.mark.parametrize("wrap_up", OUTPUTS)
def test_a_tensor_inside_an_output_is_exchanged_and_no_other(wrap_up: Callable[[Tensor], Any]) -> None:
    old, new = torch.zeros(2), torch.ones(2)
    output = wrap_up(old)
    (key,) = output_tensors(output)
    changed = put(output, key, new)
    assert pick(changed, key) is new and type(changed) is type(output)
    assert isinstance(output, dict) or output is old or pick(output, key) is old


def test_prompts_of_unequal_length_give_what_they_give_alone() -> None:
    engine = wrap(own_model())
    points = ["z.1", "resid_post.0", "attn_probs.0"]
    together = engine.run([Request(prompt, points) for prompt in PROMPTS])
    for prompt, result in zip(PROMPTS, together, strict=True):
        alone = engine.run([Request(prompt, points)])[0]
        assert all(torch.equal(result.capture[p], alone.capture[p]) for p in points)
    rows = run_with_cache(engine, torch.tensor([[5, 7, 9], [3, 8, 2]]), "resid_mid.1")["resid_mid.1"]
    assert rows.shape == (2, 3, D_MODEL)


def test_an_edit_moves_what_follows_and_nothing_stays_behind() -> None:
    model = own_model()
    engine, block = wrap(model), model.blocks[1]
    new = torch.randn(len(PROMPTS[0]), D_MODEL, dtype=torch.float64)
    result = engine.run([Request(PROMPTS[0], ["resid_post.1"], [Replace("resid_mid.1", new)])])[0]
    assert torch.allclose(result.capture["resid_post.1"], new + block.mlp(block.norm2(new)), rtol=1e-13)  # type: ignore[operator]
    assert hook_count(model) == 0


def test_torchs_own_encoder_layer_shows_its_sublayers_and_hides_its_heads() -> None:
    engine = wrap(own_model(TorchBlock))
    served = readable(engine, matrices=True, layers=[0])
    assert {"attn_in.0", "attn_out_post.0", "resid_mid.0", "mlp_pre.0", "mlp_act.0", "mlp_out_post.0"} <= set(served)
    assert "no attention matrix that is seen" in engine.support("z.0").reason
    with pytest.raises(PointRefused, match=r"attn_in\.0 can be read but not written"):
        engine.run([Request(PROMPTS[0], [], [Add("attn_in.0", torch.zeros(D_MODEL))])])
    block: Any = engine.module.get_submodule("blocks.0")
    result = engine.run([Request(PROMPTS[0], ["attn_in.0", "attn_out_post.0", "resid_pre.0", "resid_post.0"])])[0]
    x = result.capture["attn_in.0"][None]
    assert torch.allclose(x, block.norm1(result.capture["resid_pre.0"])[None])
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    attended = block.self_attn(x, x, x, attn_mask=later, need_weights=False)[0][0]
    assert torch.allclose(result.capture["attn_out_post.0"], attended)


def test_generation_without_a_cache_is_refused() -> None:
    engine = wrap(own_model(), prove=False)
    with pytest.raises(UserError, match="cannot generate: its forward takes no cache or past_key_values") as error:
        engine.run([Request([5, 7], max_new_tokens=2)])
    assert "\n" not in str(error.value)


def test_a_context_that_no_config_says_can_be_given() -> None:
    engine = wrap(own_model(), n_ctx=N_CTX, prove=False)
    with pytest.raises(UserError, match=f"the model's context is {N_CTX}"):
        engine.run([Request([1] * (N_CTX + 1))])


class OneHot(nn.Module):
    """Ids become vectors by a product: no table shows how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(9, 8), nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(nn.functional.one_hot(ids, 9).float())
        return x + self.blocks[0](x)


def test_a_vocabulary_that_no_run_shows_is_asked_for() -> None:
    with pytest.raises(InterpError, match=r"wrap\(module, d_vocab=\.\.\.\)"):
        wrap(OneHot())


def test_how_a_forward_is_called() -> None:
    class Transformers(nn.Module):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            return input_ids

    class Own(nn.Module):
        def forward(self, x, attention_mask=None, **kwargs):
            return x

    ids, ones = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)
    given = calling_of(Transformers()).inputs(ids, ones, ids)
    assert list(given) == ["input_ids", "attention_mask", "position_ids", "use_cache"] and given["use_cache"] is False
    assert list(calling_of(Own()).inputs(ids, ones, ids, use_cache=True)) == ["x", "attention_mask"]
    assert not calling_of(own_model()).masks and calling_of(Own()).masks
