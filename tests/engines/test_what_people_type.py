"""What people type first gets an answer in a sentence."""

import pytest
import torch

from interp import Request, run_with_cache
from interp.errors import UserError
from tests.families.loaded import engine


@pytest.mark.usefixtures("unchecked_signatures")
def test_text_where_token_ids_belong() -> None:
    with pytest.raises(UserError, match=r"model\.to_tokens"):
        run_with_cache(engine("llama"), "The capital of France is", ["mlp_out.1"])  # type: ignore[arg-type]


def test_one_point_without_a_list() -> None:
    tokens = torch.tensor([[1, 5, 7]])
    one, listed = (run_with_cache(engine("llama"), tokens, points) for points in ("mlp_out.1", ["mlp_out.1"]))
    assert torch.equal(one["mlp_out.1"], listed["mlp_out.1"])


def test_a_request_takes_what_to_tokens_gives() -> None:
    tokens = torch.tensor([[1, 5, 7]])
    (batched,) = engine("llama").run([Request(tokens, capture=["mlp_out.1"])])
    (plain,) = engine("llama").run([Request([1, 5, 7], capture=["mlp_out.1"])])
    assert batched.tokens == [1, 5, 7] and torch.equal(batched.capture["mlp_out.1"], plain.capture["mlp_out.1"])
    with pytest.raises(UserError, match=r"one prompt.*\[2, 2\]"):
        engine("llama").run([Request(torch.tensor([[1, 5], [7, 9]]))])
    with pytest.raises(UserError, match="float"):
        engine("llama").run([Request(torch.tensor([1.5, 2.0]))])


@pytest.mark.usefixtures("unchecked_signatures")
def test_a_stream_of_another_width_has_no_logits() -> None:
    with pytest.raises(UserError, match=r"unembed takes \[\.\.\., 48\]"):
        engine("llama").unembed(torch.zeros(3, dtype=torch.float64))


def test_objects_say_what_they_are() -> None:
    (result,) = engine("llama").run([Request([1, 5], capture=["mlp_out.1"])])
    assert repr(result.capture) == "Capture(mlp_out.1: [2, 48])"
    assert "3 layers, d_model 48, float64" in repr(engine("llama"))
