"""A transcoder's arithmetic: by hand, and that b_dec never touches its input."""

import pytest
import torch

from interp.dictionaries import Transcoder
from interp.errors import InterpError, UserError


def randomised(**kwargs) -> Transcoder:
    transcoder = Transcoder(**kwargs)
    for parameter in transcoder.parameters():
        torch.nn.init.normal_(parameter)
    return transcoder


def test_by_hand() -> None:
    transcoder = Transcoder(d_in=2, d_out=3, n_latents=3, k=1)
    assert transcoder.W_skip is not None
    with torch.no_grad():
        transcoder.W_enc.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        transcoder.b_enc.copy_(torch.tensor([0.0, 0.5, -10.0]))
        transcoder.W_dec.copy_(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [0.0, 0.0, 0.0]]))
        transcoder.b_dec.copy_(torch.tensor([0.25, 0.0, 0.0]))
        transcoder.W_skip.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]]))
    x = torch.tensor([[2.0, 1.0], [-1.0, -1.0]])
    # Pre-activations (2, 1.5, −7) and (−1, −0.5, −12): latent 0 fires with 2 at the first token, none at the second.
    assert transcoder.encode(x).tolist() == [[2, 0, 0], [0, 0, 0]]
    assert transcoder(x).tolist() == [[2 + 0.25 + 2, 4 + 1, 6 + 1], [0.25 - 1, -1, 0]]


def test_b_dec_shifts_the_output_and_nothing_else() -> None:
    transcoder = randomised(d_in=5, d_out=7, n_latents=11, k=3)
    x = torch.randn(2, 4, 5)
    latents, output = transcoder.encode(x), transcoder(x)
    with torch.no_grad():
        transcoder.b_dec.add_(100)
    assert torch.equal(transcoder.encode(x), latents)
    torch.testing.assert_close(transcoder(x), output + 100, atol=1e-4, rtol=0)


@pytest.mark.parametrize("skip", [True, False])
def test_sparse_and_dense_decoding_agree(skip: bool) -> None:
    transcoder = randomised(d_in=5, d_out=7, n_latents=11, k=3, skip=skip)
    x = torch.randn(2, 4, 5)
    values, indices = transcoder.encode_sparse(x)
    assert values.shape == indices.shape == (2, 4, 3)
    torch.testing.assert_close(transcoder.decode_sparse(values, indices, x), transcoder(x))


def test_decoding_a_skip_transcoder_needs_the_input() -> None:
    transcoder = Transcoder(d_in=5, d_out=7, n_latents=11, k=3)
    with pytest.raises(InterpError, match="needs the input"):
        transcoder.decode(torch.zeros(2, 11))
    plain = Transcoder(d_in=5, d_out=7, n_latents=11, k=3, skip=False)
    assert plain.decode(torch.zeros(2, 11)).tolist() == [plain.b_dec.tolist()] * 2


def test_a_new_transcoder_predicts_zero() -> None:
    assert not Transcoder(d_in=5, d_out=7, n_latents=11, k=3)(torch.randn(4, 5)).any()


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="exceeds the 4 latents"):
        Transcoder(d_in=2, d_out=2, n_latents=4, k=5)
    with pytest.raises(UserError, match="d_out must be a positive"):
        Transcoder(d_in=2, n_latents=4, k=2)
