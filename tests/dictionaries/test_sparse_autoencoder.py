"""A sparse autoencoder reads its input around b_dec, where it is told to."""

import pytest
import torch

from interp.dictionaries import SparseAutoencoder


@pytest.mark.parametrize("subtract", [True, False])
def test_pre_activation_against_its_equation(subtract: bool) -> None:
    sae = SparseAutoencoder(d_in=5, n_latents=11, k=3, subtract_b_dec=subtract)
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 5)
    centred = x - sae.b_dec if subtract else x
    expected = torch.einsum("td,nd->tn", centred, sae.W_enc) + sae.b_enc
    torch.testing.assert_close(sae.pre_activation(x), expected)
    torch.testing.assert_close(sae(x), sae.encode(x) @ sae.W_dec + sae.b_dec)


def test_an_orthonormal_dictionary_reconstructs_what_it_holds() -> None:
    sae = SparseAutoencoder(d_in=6, n_latents=6, activation="relu")
    with torch.no_grad():
        sae.W_enc.copy_(torch.eye(6))
        sae.W_dec.copy_(torch.eye(6))
        sae.b_dec.fill_(-3)
    x = torch.rand(4, 6)
    torch.testing.assert_close(sae(x), x)
