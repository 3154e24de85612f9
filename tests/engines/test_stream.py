"""A stream is the same continuation as a run, told token by token; between its steps the model is untouched."""

import pytest
import torch

from interp.edits import Add
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.sampling import Sampling
from interp.engines.text import Text
from interp.errors import UserError
from tests.engines.spelled import LETTERS, Spelled
from tests.families.loaded import F64, PROMPTS, engine, hook_count


def request_to(model: EagerEngine) -> Request:
    return Request(
        PROMPTS[1],
        capture=["resid_post.1", "z.2.head-1"],
        edits=[Add("resid_post.0", torch.linspace(-1, 1, model.model.width(0), dtype=F64))],
        max_new_tokens=8,
        logprobs=2,
        sampling=Sampling(temperature=1.1, seed=4, ignore_eos=True),
    )


@pytest.fixture(params=["gemma3", "split_llama"])
def spelled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EagerEngine:
    model = engine(request.param)
    monkeypatch.setattr(model, "tokenizer", Spelled())
    return model


def test_steps_add_up_to_the_run(spelled: EagerEngine) -> None:
    request = request_to(spelled)
    (whole,) = spelled.run([request])
    steps = list(spelled.stream(request))
    assert [step.token for step in steps] == whole.tokens[whole.n_prompt :]
    assert "".join(step.text for step in steps) == whole.text
    assert [step.logprob for step in steps] == whole.logprobs
    for address in whole.capture:
        assert len(steps[0].capture[address]) == whole.n_prompt and all(len(s.capture[address]) == 1 for s in steps[1:])
        assert torch.equal(torch.cat([step.capture[address] for step in steps]), whole.capture[address])
    assert [step.result is None for step in steps] == [True] * 7 + [False]
    last = steps[-1].result
    assert last is not None and last.tokens == whole.tokens and last.finish_reason == "length"


def test_between_steps_the_model_is_as_it_was(spelled: EagerEngine) -> None:
    plain = Request(PROMPTS[0], capture=["resid_post.2"], max_new_tokens=3)
    (clean,) = spelled.run([plain])
    (whole,) = spelled.run([request_to(spelled)])
    before, steps = hook_count(spelled.module), []
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        own = spelled.module(input_ids=ids).logits
    for step in spelled.stream(request_to(spelled)):
        steps.append(step.token)
        assert hook_count(spelled.module) == before and torch.is_grad_enabled()
        (between,) = spelled.run([plain])
        assert between.tokens == clean.tokens
        assert torch.equal(between.capture["resid_post.2"], clean.capture["resid_post.2"])
        with torch.no_grad():
            assert torch.equal(spelled.module(input_ids=ids).logits, own)
    assert steps == whole.tokens[whole.n_prompt :]


def test_a_stream_that_nobody_finishes_leaves_nothing_behind(spelled: EagerEngine) -> None:
    before = hook_count(spelled.module)
    steps = spelled.stream(request_to(spelled))
    next(steps)
    steps.close()
    assert hook_count(spelled.module) == before


def test_mistakes_are_told_before_the_first_step() -> None:
    with pytest.raises(UserError, match="max_new_tokens"):
        engine("llama").stream(Request([1, 2]))
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine("llama").stream(Request([1, 10_000], max_new_tokens=3))


@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_stop_text_ends_the_request_and_is_no_part_of_its_text(spelled: EagerEngine, start: int) -> None:
    free = Request(PROMPTS[1], max_new_tokens=8, sampling=Sampling(ignore_eos=True))
    (whole,) = spelled.run([free])
    assert whole.text is not None
    stop = whole.text[start : start + 3]
    at = whole.text.index(stop)
    sampling = Sampling(ignore_eos=True, stop=("never", stop))
    others = [Request(PROMPTS[0], max_new_tokens=8, sampling=Sampling(ignore_eos=True)), Request([3], max_new_tokens=2)]
    (result, *_) = spelled.run([Request(PROMPTS[1], max_new_tokens=8, sampling=sampling), *others])
    assert result.finish_reason == "stop" and result.text == whole.text[:at]
    assert result.tokens == whole.tokens[: whole.n_prompt + at + 3]
    told = [step.text for step in spelled.stream(Request(PROMPTS[1], max_new_tokens=8, sampling=sampling))]
    assert "".join(told) == whole.text[:at]


def test_what_may_begin_a_stop_text_is_held_back() -> None:
    text, shown = Text(Spelled(), ("cde",)), []
    for letter in "abcdxcdef":
        ended = text.add(LETTERS.index(letter))
        shown.append(text.take(final=ended))
        if ended:
            break
    assert shown == ["a", "b", "", "", "cdx", "", "", ""] and text.whole == "abcdx"


def test_an_unfinished_character_is_held_back() -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text, shown = Text(Bytes(), ()), []
    for byte in "aé€".encode():
        text.add(byte)
        shown.append(text.take(final=False))
    assert shown == ["a", "", "é", "", "", "€"]


def test_stop_texts_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match="tokenizer"):
        engine("llama").run([Request([1], max_new_tokens=2, sampling=Sampling(stop=("x",)))])


def test_a_conversation_goes_through_the_tokenizers_template(spelled: EagerEngine) -> None:
    found = spelled.to_chat_tokens([{"role": "user", "content": "hi"}])
    assert found.tolist() == [[LETTERS.index(letter) for letter in "uhiZ"]]
    assert spelled.to_chat_tokens([{"role": "user", "content": "hi"}], add_generation_prompt=False).shape == (1, 3)
    with pytest.raises(UserError, match="no chat template"):
        engine("llama").to_chat_tokens([{"role": "user", "content": "hi"}])
