"""Where SmolLM2 keeps which country was named: at its token in early layers, at the last token in late ones."""

import pytest
import torch

from interp.analysis import (
    LogitDifference,
    activation_patching,
    contrastive_vector,
    direct_logit_attribution,
    logit_lens,
)
from interp.edits import Add
from interp.engines.base import Request
from interp.engines.eager import EagerEngine

pytestmark = pytest.mark.real

CLEAN, CORRUPTED = "The capital of France is", "The capital of Italy is"
METRIC = LogitDifference(" Paris", " Rome")
GOOD = ["I love this film", "What a wonderful day", "She was very happy", "The food was delicious", "A great success",
        "He smiled with joy"]  # fmt: skip
BAD = ["I hate this film", "What a terrible day", "She was very sad", "The food was disgusting", "A great failure",
       "He cried with grief"]  # fmt: skip


def test_the_country_moves_from_its_token_to_the_last(smollm: EagerEngine) -> None:
    words = [smollm.tokenizer.decode([t]) for t in smollm.to_tokens(CORRUPTED)[0].tolist()]
    subject, last = words.index(" Italy"), len(words) - 1
    points = [f"resid_post.{layer}" for layer in (0, 2, 5, 15, 27, 29)]
    found = activation_patching(smollm, CLEAN, CORRUPTED, points, METRIC)
    assert found.clean > 2 and found.corrupted < -2
    early, late = found.recovered[:3], found.recovered[-2:]
    assert (early[:, subject] > 0.9).all() and (early[:, last].abs() < 0.1).all()
    assert (late[:, last] > 0.9).all() and (late[:, subject].abs() < 0.1).all()
    assert found.effect[:, :subject].abs().max() < 1e-3
    everything = activation_patching(smollm, CLEAN, CORRUPTED, "resid_post.10", METRIC, positions=[range(len(words))])
    assert float(everything.recovered[0, 0]) == pytest.approx(1.0, abs=1e-4)


def test_lens_and_attribution_end_at_the_model_s_own_logits(engine: EagerEngine) -> None:
    (result,) = engine.run([Request(CLEAN, return_logits=True)])
    assert result.logits is not None
    n, own = engine.model.n_layers, result.logits
    lens = logit_lens(engine, CLEAN, layers=[0, n - 1], return_logits=True)
    assert lens.logits is not None and (lens.logits[1] - own).abs().max() <= 1e-4
    assert torch.equal(lens.token_ids[1, -1], own[-1].topk(5).indices)
    for heads in (False, True):
        found = direct_logit_attribution(engine, CLEAN, " Paris", " Rome", heads=heads)
        paris, rome = (engine.tokenizer(word, add_special_tokens=False).input_ids[0] for word in (" Paris", " Rome"))
        assert found.logit == pytest.approx(float(own[-1, paris] - own[-1, rome]), abs=1e-4)
        size = sum(abs(row.value) for row in found.rows)
        assert abs(found.error) <= 1e-5 * size and not found.unsplit


def test_a_direction_of_six_pairs_steers(smollm: EagerEngine) -> None:
    """Towards the praise: next to the plain prompt, praise becomes more likely and blame less."""
    vector = contrastive_vector(smollm, GOOD, BAD, "resid_post.15")
    prompt = "The movie was very"
    edits = [[], [Add("resid_post.15", vector, scale=4.0)], [Add("resid_post.15", vector, scale=-4.0)]]
    results = smollm.run([Request(prompt, edits=edit, return_logits=True) for edit in edits])
    metric = [" good", " bad"]
    ids = [smollm.tokenizer(word, add_special_tokens=False).input_ids[0] for word in metric]
    plain, towards, away = (float(r.logits[-1, ids[0]] - r.logits[-1, ids[1]]) for r in results if r.logits is not None)
    assert away < plain - 1 and towards > plain + 1
