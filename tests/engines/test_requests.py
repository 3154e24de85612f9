"""Every mistake in a request is one sentence, found before the model runs; nothing is left behind by an error."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from interp.edits import Ablate, Add, Replace, Scale
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from interp.engines.load import wrap
from interp.errors import PointRefused, UserError
from tests.families.loaded import F32, engine
from tests.families.tiny import build

TOKENS = [11, 64, 2]
V = torch.ones(48)

MISTAKES: list[tuple[Callable[[], Request], type[Exception], str]] = [
    (lambda: Request([]), UserError, "at least one token"),
    (lambda: Request([131]), UserError, "131 is outside the vocabulary of 131"),
    (lambda: Request([-1]), UserError, "outside the vocabulary"),
    (lambda: Request([1] * 65), UserError, "context is 64"),
    (lambda: Request([1], max_new_tokens=-1), UserError, "below 0"),
    (lambda: Request("text without a tokenizer"), UserError, "no tokenizer"),
    (
        lambda: Request(TOKENS, capture=["resid_midd.0"]),
        UserError,
        "No point is called 'resid_midd'; nearest: resid_mid",
    ),
    (lambda: Request(TOKENS, capture=["resid_mid"]), UserError, "once per layer"),
    (lambda: Request(TOKENS, capture=["final_norm.0"]), UserError, "once per model"),
    (lambda: Request(TOKENS, capture=["resid_mid.3"]), PointRefused, r"layers 0 to 2. Nearest: resid_mid\.2"),
    (lambda: Request(TOKENS, capture=["q_norm_in.0"]), PointRefused, "no norm on its query. Nearest: query.0"),
    (lambda: Request(TOKENS, capture=["router_logits.0"]), PointRefused, "no router"),
    (lambda: Request(TOKENS, capture=["resid_streams.0"]), PointRefused, "does not exist here"),
    (lambda: Request(TOKENS, capture=["resid_pre.0.stream-1"]), PointRefused, "one stream"),
    (lambda: Request(TOKENS, capture=["z.0.head-6"]), PointRefused, "heads 0 to 5"),
    (lambda: Request(TOKENS, capture=["value.0.head-2"]), PointRefused, "heads 0 to 1"),
    (lambda: Request(TOKENS, capture=["mlp_in.0.head-0"]), UserError, "no head axis"),
    (lambda: Request(TOKENS, edits=[Add("resid_post.0", torch.ones(47))]), UserError, "47 wide, but the point is 48"),
    (lambda: Request(TOKENS, edits=[Add("mlp_act.0", torch.ones(48))]), UserError, "48 wide, but the point is 80"),
    (lambda: Request(TOKENS, edits=[Add("z.0", torch.ones(60))]), UserError, "60 wide, but the point is 10"),
    (lambda: Request(TOKENS, edits=[Add("value.0", torch.ones(6, 10))]), UserError, r"shape \[6, 10\].*\[2, 10\]"),
    (lambda: Request(TOKENS, edits=[Add("resid_post.0", torch.ones(3, 48))]), UserError, r"shape \[3, 48\]"),
    (lambda: Request(TOKENS, edits=[Add("resid_post.0", torch.tensor(1.0))]), UserError, "0 wide"),
    (
        lambda: Request(TOKENS, edits=[Replace("resid_post.0", torch.ones(2, 48))]),
        UserError,
        "2 rows.*reaches position 2",
    ),
    (lambda: Request(TOKENS, edits=[Ablate("resid_post.0", positions=(3,))]), UserError, "Position 3 .* 3 tokens"),
    (lambda: Request(TOKENS, edits=[Ablate("resid_post.0", positions=(0, -1))]), UserError, "Position -1"),
    (lambda: Request(TOKENS, edits=[Ablate("attn_normalized.1")]), PointRefused, "not written"),
    (lambda: Request(TOKENS, edits=[Ablate("mlp_norm_scale.1")]), PointRefused, "not written"),
    (lambda: Request(TOKENS, edits=[Ablate("head_out.1.head-0")]), PointRefused, "not written"),
    (lambda: Request(TOKENS, edits=[Ablate("logits")]), PointRefused, "not written"),
    (lambda: Request(TOKENS, edits=[Ablate("attn_gate.1")]), PointRefused, "no gate"),
]


@pytest.fixture
def forwards() -> Iterator[list[int]]:
    """Grows by one with every forward pass of any module of the tiny Llama's stream."""
    model = engine("llama", F32)
    seen: list[int] = []
    handle = model.module.get_submodule("model.embed_tokens").register_forward_pre_hook(lambda m, a: seen.append(1))
    yield seen
    handle.remove()


@pytest.mark.parametrize(("request_", "kind", "sentence"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_a_mistake_is_found_before_any_forward(
    request_: Callable[[], Request], kind: type[Exception], sentence: str, forwards: list[int]
) -> None:
    model = engine("llama", F32)
    with pytest.raises(kind, match=sentence) as error:
        model.run([Request(TOKENS), request_()])
    assert forwards == []
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    model.run([Request(TOKENS)])
    assert len(forwards) == 1


@pytest.mark.parametrize("address", ["z.0.head-6", "resid_pre.0.stream-1", "resid_mid.7", "q_norm_in.1"])
def test_support_says_what_run_would_say(address: str) -> None:
    support = engine("llama", F32).support(address)
    assert not support.readable and not support.writable and support.reason


def test_support_tells_reading_from_writing() -> None:
    model = engine("llama", F32)
    assert model.support("resid_post.1") == model.support("z.1.head-5")
    for address in ("head_out.1", "mlp_norm_scale.1", "mlp_normalized.1", "logits"):
        support = model.support(address)
        assert support.readable and not support.writable and support.reason


@pytest.mark.usefixtures("unchecked_signatures")
def test_tokens_need_two_axes() -> None:
    with pytest.raises(UserError, match=r"\[batch, pos\]"):
        run_with_cache(engine("llama", F32), torch.tensor([1, 2]), ["resid_post.0"])


def test_a_missing_capture_says_what_there_is() -> None:
    cache = run_with_cache(engine("llama", F32), torch.tensor([TOKENS]), ["resid_post.0"])
    with pytest.raises(KeyError, match=r"resid_post\.1 was not captured; captured: resid_post\.0"):
        cache["resid_post.1"]  # type: ignore[index]
    assert "resid_post.0" in cache and "resid_post.1" not in cache


def test_threads_that_run_one_engine_at_once_each_get_what_they_get_alone() -> None:
    """Each with its own edits and captures, some inside attention, whose implementation is switched meanwhile."""
    from concurrent.futures import ThreadPoolExecutor

    model = engine("gemma3")
    asks = [
        Request(
            [7 + i, 3, 99 - i],
            capture=["attn_probs.1" if i % 3 == 0 else "z.1"],
            edits=[Scale("mlp_out_post.0", 0.1 * i)],
            max_new_tokens=0 if i % 3 == 0 else 3,
        )
        for i in range(12)
    ]
    alone = [model.run([ask])[0] for ask in asks]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda ask: model.run([ask])[0], asks * 2))
    for found, right in zip(together, alone * 2, strict=True):
        assert found.tokens == right.tokens
        assert all(torch.equal(found.capture[a], right.capture[a]) for a in right.capture)


def test_a_closed_engine_holds_no_module_and_says_that_it_is_closed() -> None:
    for name in ("eager", "nnsight"):
        model = wrap(build("llama", F32), engine=name)
        model.run([Request([1, 2, 3], capture=["resid_post.1"], max_new_tokens=2)])
        block = weakref.ref(model.module.get_submodule("model.layers.1"))
        model.close()
        gc.collect()
        assert block() is None
        with pytest.raises(UserError, match="is closed; load the model again"):
            model.run([Request([1])])
