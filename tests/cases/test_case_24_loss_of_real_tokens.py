"""TransformerLens#1607: a loss counts the real tokens, whatever ids stand under the mask."""

import pytest
import torch
from torch import Tensor

from interp.engines.cache import run_with_cache
from tests.families.loaded import engine


def losses(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """[pairs]: the loss of each real token that follows a real one in its row."""
    found = []
    for row in range(len(tokens)):
        keep = mask[row].bool()
        ids, own = tokens[row][keep], logits[row][keep]
        found.append(-own[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "bloom"])
def test_the_loss_is_the_masked_sum_over_the_masked_count(family: str) -> None:
    model = engine(family)
    tokens = torch.randint(0, 131, (3, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0]])
    other = torch.where(mask.bool(), tokens, (tokens + 40) % 131)
    own, same = (run_with_cache(model, ids, ["logits"], attention_mask=mask)["logits"] for ids in (tokens, other))  # type: ignore[index]
    loss = losses(own, tokens, mask)
    assert len(loss) == 2 + 6 + 3 and torch.equal(loss, losses(same, other, mask))
    with torch.no_grad(), model.numerics():
        solo = [
            model.module(input_ids=row[keep][None], labels=row[keep][None], use_cache=False).loss
            * (int(keep.sum()) - 1)
            for row, keep in zip(tokens, mask.bool(), strict=True)
        ]
    assert abs(float(loss.mean()) - float(sum(solo)) / len(loss)) < 1e-12
    naive = -own[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    assert bool(naive.mean().isnan())  # a mean that forgets the mask cannot pass unnoticed
