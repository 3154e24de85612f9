"""SAELens#326: a dictionary spliced in with its error changes nothing, and ablating a latent then takes out just that.

There the error was computed again through the user's hooks, after the ablation, and cancelled it.
"""

import pytest
import torch

from interp.dictionaries import ActivationConfig, DictionaryConfig, SparseAutoencoder
from interp.edits import Edit, Reconstruct, SetFeature
from interp.engines.base import Request, Result
from tests.families.loaded import F64, PROMPTS, engine

AT = "resid_post.1"


def jumprelu(d: int = 48, n: int = 120) -> SparseAutoencoder:
    """With large biases on both sides and thresholds that silence many latents."""
    generator = torch.Generator().manual_seed(5)
    sae = SparseAutoencoder(DictionaryConfig("sae", d, d, n, ActivationConfig("jumprelu"), subtract_b_dec=True)).to(F64)
    for name, parameter in sae.named_parameters():
        size = 1.0 if name.startswith("W") else 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=F64) * size
    sae.activation.threshold.data.abs_().add_(1.0)  # type: ignore[union-attr]
    return sae.requires_grad_(False)


@pytest.mark.parametrize("new", [0, 5])
def test_an_ablated_latent_takes_out_its_decoder_row_alone(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sae = engine("llama"), jumprelu()
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", None)
    splice = Reconstruct(AT, AT, sae, keep_error=True)
    for prompt in PROMPTS[:2]:
        (clean,) = model.run([Request(prompt, capture=[AT], max_new_tokens=new, return_logits=True)])
        x = clean.capture[AT]
        z = sae.encode(x)
        i = int(z.sum(0).argmax())
        assert 0 < (z > 0).double().mean() < 0.6 and (x - sae(x)).norm() > x.norm() * 0.1

        def run(tokens: list[int], *edits: Edit) -> Result:
            return model.run([Request(tokens, capture=[AT], edits=edits, return_logits=True)])[0]

        same = clean.tokens[: len(x)]
        spliced = run(same, splice)
        assert (spliced.capture[AT] - x).abs().max() < 1e-12
        assert (spliced.logits - clean.logits).abs().max() < 1e-11  # type: ignore[operator]
        ablate = SetFeature(AT, sae, i, value=0)
        right = x - z[:, i : i + 1] * sae.W_dec[i]
        for edits in ((splice, ablate), (ablate,), (ablate, splice)):
            assert (run(same, *edits).capture[AT] - right).abs().max() < 1e-12
        cached = model.run([Request(prompt, capture=[AT], edits=[splice, ablate], max_new_tokens=new)])[0]
        full = run(cached.tokens[: len(cached.capture[AT])], splice, ablate)
        assert (cached.capture[AT] - full.capture[AT]).abs().max() < 1e-11
        assert (right - x).abs().max() > 0.1
