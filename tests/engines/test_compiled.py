"""A compiled step decodes what the engine's own pass decodes, with the same captures and edits, and holds no hook."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from interp.edits import Ablate, Add, Call, Cap, Edit, Project, Replace, Scale, Swap
from interp.engines import compiled
from interp.engines.base import Request, Result
from interp.engines.eager import EagerEngine
from interp.engines.load import load_model, wrap
from interp.engines.sampling import Sampling
from interp.errors import InterpError, UserError
from tests.families.loaded import F32, engine, hook_count
from tests.families.tiny import build

PROMPTS = ([7, 3, 99], [11, 64, 2, 130, 5, 5, 88])
FREE = Sampling(ignore_eos=True)
V = torch.linspace(-1, 1, 48)


@cache
def compiled_engine(family: str) -> EagerEngine:
    model = wrap(build(family, F32))
    model.compile()
    return model


def requests(edits: Sequence[Edit] = (), points: Sequence[str] = (), new: int = 6, **more: Any) -> list[Request]:
    return [Request(p, capture=points, edits=edits, max_new_tokens=new, sampling=FREE, **more) for p in PROMPTS]


def same(found: list[Result], right: list[Result]) -> None:
    for one, other in zip(found, right, strict=True):
        assert one.tokens == other.tokens
        assert (one.provenance.engine, other.provenance.engine) == ("eager, compiled", "eager")
        for address in other.capture:
            a, b = one.capture[address], other.capture[address]
            assert a.shape == b.shape and a.dtype == b.dtype
            assert (a - b).abs().max() <= 2e-5 * (1 + b.abs().max()), address
        if other.logits is not None:
            assert one.logits is not None and (one.logits - other.logits).abs().max() <= 2e-5 * other.logits.abs().max()


POINTS = ["resid_post.1", "resid_pre.0", "attn_out.1", "mlp_out_post.2", "z.1.head-2", "mlp_normalized.1", "final_norm"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bloom"])
def test_tokens_logits_and_captures_are_those_of_the_engine_uncompiled(family: str) -> None:
    """Rows of unequal length, sliding windows, biased maps stored either way round, positions by bias."""
    ask = requests(points=POINTS, return_logits=True)
    same(compiled_engine(family).run(ask), engine(family, F32).run(ask))


def count(caplog: pytest.LogCaptureFixture) -> int:
    return sum("was compiled in" in record.getMessage() for record in caplog.records)


def test_another_vector_scale_or_position_needs_no_other_graph(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="interp")
    model, right, seen = compiled_engine("llama"), engine("llama", F32), []
    steering = [
        [Add("resid_post.1", V), Scale("mlp_out_post.0", 0.5)],
        [Add("resid_post.1", 3 * V, scale=2.0, positions=("last_prompt", "generated")), Scale("mlp_out_post.0", -1.5)],
        [Add("resid_post.1", V, positions=(6, 7)), Scale("mlp_out_post.0", 0.1, positions="5:")],
        [Add("resid_post.1", V, positions="prompt"), Scale("mlp_out_post.0", 0.0, positions="generated")],
    ]
    for edits in steering:
        ask = requests(edits, ["resid_post.2"], return_logits=True)
        found = model.run(ask)
        same(found, right.run(ask))
        seen.append(found[0].tokens + found[1].tokens)
    assert len({tuple(tokens) for tokens in seen}) > 1
    assert count(caplog) == 1


@pytest.mark.parametrize("family", ["gemma3", "split_llama_mlp"])
def test_every_kind_of_edit_that_is_data(family: str) -> None:
    rows = torch.randn(20, 48, generator=torch.Generator().manual_seed(3))
    edits = [
        Project("resid_post.0", V[: engine(family, F32).model.width(0)], keep=0.2),
        Cap("resid_mid.1", V, 0.1),
        Swap("attn_out_post.1", V, V.flip(0)),
        Ablate("mlp_in.1", "mean"),
        Ablate("z.2.head-3"),
        Replace("resid_pre.2", rows, positions=(2, 5, 7)),
    ]
    ask = requests(edits, ["resid_post.2"], return_logits=True)
    found, right = compiled_engine(family).run(ask), engine(family, F32).run(ask)
    same(found, right)
    plain = engine(family, F32).run(requests(points=["resid_post.2"]))
    assert all(
        (a.capture["resid_post.2"] - b.capture["resid_post.2"]).abs().max() > 0.1
        for a, b in zip(right, plain, strict=True)
    )


def test_plain_capture_steer_plain_each_equals_eager_and_nothing_stays() -> None:
    """CASES 9 and 54 with a compiled step: hooks that come later act, none is left over, captures are copies."""
    model, right = compiled_engine("llama"), engine("llama", F32)
    before = hook_count(model.module)
    asks = [
        requests(return_logits=True),
        requests(points=["resid_post.1"], return_logits=True),
        requests([Add("resid_post.0", 5 * V)], ["resid_post.1"], return_logits=True),
        requests(return_logits=True),
    ]
    results = []
    for ask in asks:
        results.append(model.run(ask))
        kept = [{a: t.clone() for a, t in r.capture.items()} for r in results[-1]]
        same(results[-1], right.run(ask))
        assert hook_count(model.module) == before
        model.run(requests(points=["resid_post.1"]))
        for one, copies in zip(results[-1], kept, strict=True):
            assert all(torch.equal(one.capture[a], t) for a, t in copies.items())
    for first, last in zip(results[0], results[-1], strict=True):
        assert first.logits is not None and last.logits is not None and torch.equal(first.logits, last.logits)


def test_no_module_is_called_by_a_compiled_step() -> None:
    model, calls = compiled_engine("llama"), []
    model.run(requests())
    handle = model.module.get_submodule("model.layers.1").register_forward_hook(lambda m, a, y: calls.append(len(a)))
    model.run(requests())
    handle.remove()
    assert len(calls) == 1  # the prompts' pass


def test_a_stream_is_the_run() -> None:
    model, ask = compiled_engine("gpt2"), requests(points=["resid_post.1"])[0]
    (whole,) = model.run([ask])
    steps = list(model.stream(ask))
    assert [s.token for s in steps] == whole.tokens[whole.n_prompt :]
    assert torch.equal(torch.cat([s.capture["resid_post.1"] for s in steps]), whole.capture["resid_post.1"])


def test_python_inside_the_pass_is_refused_before_any_forward() -> None:
    with pytest.raises(UserError, match=r"Call at resid_post\.1 runs Python"):
        compiled_engine("llama").run(requests([Call("resid_post.1", torch.sin)]))
    prompt_alone = Request(PROMPTS[0], edits=[Call("resid_post.1", torch.sin)], return_logits=True)
    assert compiled_engine("llama").run([prompt_alone])[0].logits is not None


def test_a_model_with_another_state_than_keys_and_values_is_refused() -> None:
    from interp.models.tiny import tiny_model

    with pytest.raises(UserError, match="something else than keys and values"):
        wrap(tiny_model("mamba"), prove=False).compile()


def test_a_pass_that_depends_on_values_is_refused_with_the_reason() -> None:
    model = wrap(build("mixtral", F32), prove=False)
    model.compile()
    with pytest.raises(UserError, match="cannot be decoded by a compiled graph"):
        model.run(requests(new=3))


def test_a_graph_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(build("llama", F32), prove=False)
    model.compile()
    rewrite = compiled.unroll_thin_products

    def wrong(graph: torch.fx.Graph) -> int:
        node = next(n for n in graph.nodes if n.target is torch.ops.aten.silu.default)
        node.target = torch.ops.aten.sigmoid.default
        return rewrite(graph)

    monkeypatch.setattr(compiled, "unroll_thin_products", wrong)
    with pytest.raises(InterpError, match="computes another logits"):
        model.run(requests(new=3))


def test_what_cannot_be_compiled_is_said_when_the_model_is_loaded() -> None:
    with pytest.raises(UserError, match="compile=True needs the whole model on one device"):
        load_model("nothing", compile=True, device_map="auto")
