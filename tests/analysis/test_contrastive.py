"""A contrastive vector is a difference of two means of rows, each read at the end of its own prompt."""

import pytest
import torch

from interp.analysis import contrastive_vector
from interp.edits import Add
from interp.engines.base import Request
from interp.errors import PointRefused, UserError
from tests.analysis.subjects import CLEAN, reader, subject

POSITIVE, NEGATIVE = [[7, 3, 99], [11, 64, 2, 130, 5], [40]], [[9, 9], [1, 2, 3, 4, 5, 6, 7]]


CELLS = [("llama", point) for point in ("resid_post.1", "mlp_out.2", "z.1", "z.1.head-2", "final_norm")]
CELLS += [("split_llama", point) for point in ("resid_post.0", "z.0.head-3", "adapter_out")]


@pytest.mark.parametrize(("family", "point"), CELLS)
@pytest.mark.parametrize("position", [-1, 0])
def test_it_equals_a_loop_over_prompts(family: str, point: str, position: int) -> None:
    model = subject(family)

    def mean(prompts: list[list[int]]) -> torch.Tensor:
        rows = [model.run([Request(prompt, capture=[point])])[0].capture[point][position] for prompt in prompts]
        return sum(rows[1:], rows[0]) / len(rows)

    right = mean(POSITIVE) - mean(NEGATIVE)
    for batch_size in (1, 2, 16):
        found = contrastive_vector(model, POSITIVE, NEGATIVE, point, position=position, batch_size=batch_size)
        assert found.shape == right.shape and (found - right).abs().max() <= 1e-12
    assert right.abs().max() > 1e-3


def test_added_to_the_mean_of_one_kind_it_gives_the_other() -> None:
    model, point = subject("gpt2"), "resid_post.1"
    vector = contrastive_vector(model, [CLEAN], [[40]], point)
    edited = Request([40], capture=[point], edits=[Add(point, vector)])
    wanted = Request(CLEAN, capture=[point])
    got, right = (model.run([request])[0].capture[point][-1] for request in (edited, wanted))
    assert (got - right).abs().max() <= 1e-12


def test_text_is_read_as_the_tokenizer_reads_it() -> None:
    words = contrastive_vector(reader(), ["w1 w2", "w3"], ["w4 w5 w6"], "resid_post.1")
    good, bad = ([reader().to_tokens(text) for text in texts] for texts in (["w1 w2", "w3"], ["w4 w5 w6"]))
    assert good[0].tolist() == [[1, 5, 6]] and torch.equal(
        words, contrastive_vector(reader(), good, bad, "resid_post.1")
    )


def test_what_cannot_be_asked() -> None:
    model = reader()
    for wrong, said in (
        (([], ["w1"]), "positive prompts"),
        ((["w1"], []), "negative prompts"),
        (("w1", ["w1"]), "list"),
    ):
        with pytest.raises(UserError, match=said):
            contrastive_vector(model, *wrong, "resid_post.1")
    with pytest.raises(UserError, match="pair of positions"):
        contrastive_vector(model, ["w1"], ["w2"], "attn_probs.1")
    with pytest.raises(UserError, match="Position 2 is outside the prompt of 2 tokens"):
        contrastive_vector(model, ["w1"], ["w2"], "resid_post.1", position=2)
    with pytest.raises(UserError, match="batch_size"):
        contrastive_vector(model, ["w1"], ["w2"], "resid_post.1", batch_size=0)
    with pytest.raises(PointRefused, match="layers 0 to 2"):
        contrastive_vector(model, ["w1"], ["w2"], "resid_post.3")
