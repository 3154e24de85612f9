"""circuit-tracer#38, SAELens#624: Gemma 2's `hook_mlp_out` is behind a norm, what a transcoder predicts before it."""

import torch

from interp.dictionaries import Transcoder
from interp.edits import Replace
from interp.engines.base import Request
from interp.names import point_of
from tests.families.loaded import F64, engine

TOKENS = [7, 3, 99, 64]


def test_the_name_is_the_contribution_and_not_the_modules_output() -> None:
    model = engine("gemma2")
    address = point_of("blocks.1.hook_mlp_out", "transformer_lens")
    assert str(address) == "mlp_out_post.1"
    norm = model.module.get_submodule("model.layers.1.post_feedforward_layernorm")
    (result,) = model.run([Request(TOKENS, capture=[address, "mlp_out.1", "resid_mid.1", "resid_post.1"])])
    got = result.capture
    with torch.no_grad(), model.numerics():
        assert torch.equal(norm(got["mlp_out.1"]), got[address])
    assert torch.allclose(got["resid_mid.1"] + got[address], got["resid_post.1"], rtol=0, atol=1e-14)
    assert not torch.allclose(got["resid_mid.1"] + got["mlp_out.1"], got["resid_post.1"], atol=0.1)


def test_a_transcoder_and_its_error_spliced_before_the_norm_leave_the_logits_alone() -> None:
    model = engine("gemma2")
    torch.manual_seed(0)
    transcoder = Transcoder(d_in=48, d_out=48, n_latents=96, k=4).double()
    for parameter in transcoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    (clean,) = model.run([Request(TOKENS, capture=["mlp_in.1", "mlp_out.1"], return_logits=True)])
    with torch.no_grad():
        prediction = transcoder(clean.capture["mlp_in.1"])
    error = clean.capture["mlp_out.1"] - prediction
    assert prediction.dtype == F64 and error.abs().max() > 0.1
    spliced, bare, behind = model.run(
        [
            Request(TOKENS, edits=[Replace("mlp_out.1", prediction + error)], return_logits=True),
            Request(TOKENS, edits=[Replace("mlp_out.1", prediction)], return_logits=True),
            Request(TOKENS, edits=[Replace("mlp_out_post.1", prediction + error)], return_logits=True),
        ]
    )
    assert torch.allclose(spliced.logits, clean.logits, rtol=0, atol=1e-11)  # type: ignore[arg-type]
    for other in (bare, behind):  # without the error, and spliced at the other side of the norm
        assert (other.logits - clean.logits).abs().max() > 1e-2  # type: ignore[operator]
