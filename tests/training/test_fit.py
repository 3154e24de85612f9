"""A fitted transcoder explains what a linear map cannot, on data that it has not seen."""

import torch

from interp.eval import fraction_of_variance_unexplained
from interp.training import TranscoderTrainingConfig
from interp.training.fit import StepReport, fit_transcoder, initial_directions

CONFIG = TranscoderTrainingConfig(expansion_factor=4, k=4, epochs=30, batch_size=100, lr=3e-3)


def curved(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear map plus |x|, which no linear map explains at all; far from zero and badly scaled, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(99))
    y = x @ weight + 3 * x[:, :5].abs()
    return 0.01 * x + 4, 200 * y - 1000


def test_beats_the_linear_map_on_unseen_data() -> None:
    x, y = curved(2000, 1)
    fitted = fit_transcoder(x, y, CONFIG)
    x, y = curved(1000, 2)
    linear = fraction_of_variance_unexplained(y, fitted.linear(x))
    assert fraction_of_variance_unexplained(y, fitted.transcoder(x)) < 0.5 * linear
    assert linear > 0.2


def test_training_starts_at_the_best_linear_map_and_descends() -> None:
    x, y = curved(2000, 1)
    losses: list[StepReport] = []
    fitted = fit_transcoder(x, y, CONFIG, losses.append)
    assert abs(losses[0].loss - 1) < 0.3
    assert sum(step.loss for step in losses[-20:]) / 20 < 0.5
    assert losses[-1].step == losses[-1].steps == 600
    assert losses[-1].tokens == fitted.tokens_seen == 60_000
    assert max(step.lr for step in losses) <= CONFIG.lr
    assert losses[-1].lr < 0.01 * CONFIG.lr


def test_the_skip_path_is_the_best_one_for_the_finished_latents() -> None:
    x, y = curved(2000, 1)
    transcoder = fit_transcoder(x, y, CONFIG).transcoder
    left = (y - transcoder(x)).double()
    centred = (x - x.mean(0)).double()
    assert float(left.mean(0).norm() / y.double().std()) < 1e-3
    assert float((centred.T @ left).norm() / centred.norm() / left.norm()) < 1e-3


def test_returned_latents_are_those_of_the_training_tokens() -> None:
    x, y = curved(300, 1)
    fitted = fit_transcoder(x, y, TranscoderTrainingConfig(expansion_factor=4, k=4, epochs=1, batch_size=64))
    values, indices = fitted.transcoder.encode_sparse(x)
    torch.testing.assert_close(fitted.values, values)
    assert torch.equal(fitted.indices[values > 0], indices[values > 0])


def test_one_seed_gives_one_transcoder() -> None:
    x, y = curved(300, 1)
    quick = TranscoderTrainingConfig(expansion_factor=4, k=4, epochs=2, batch_size=64)
    first, second = fit_transcoder(x, y, quick), fit_transcoder(x, y, quick)
    for name, parameter in first.transcoder.named_parameters():
        assert torch.equal(parameter, second.transcoder.get_parameter(name)), name
    other = fit_transcoder(x, y, TranscoderTrainingConfig(expansion_factor=4, k=4, epochs=2, batch_size=64, seed=1))
    assert not torch.equal(other.transcoder.W_enc, first.transcoder.W_enc)


def test_fewer_tokens_than_latents_still_train() -> None:
    x, y = curved(10, 1)
    fitted = fit_transcoder(x, y, TranscoderTrainingConfig(expansion_factor=4, k=4, epochs=2, batch_size=64))
    assert bool(torch.isfinite(fitted.transcoder(x)).all())


def test_initial_directions_are_distinct_unit_vectors_along_tokens() -> None:
    inputs = torch.randn(30, 6)
    directions = initial_directions(inputs, 20, torch.Generator().manual_seed(0))
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(20))
    cosines = directions @ torch.nn.functional.normalize(inputs, dim=-1).T
    assert torch.allclose(cosines.max(-1).values, torch.ones(20), atol=1e-5)
    assert len(set(cosines.argmax(-1).tolist())) == 20
