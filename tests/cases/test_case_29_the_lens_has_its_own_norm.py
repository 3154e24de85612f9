"""TransformerLens#1076: a logit lens recomputes the final norm's statistics for the stream that it reads."""

import torch

from interp.engines.base import Request
from tests.families.loaded import engine


def test_unembed_norms_the_stream_at_hand() -> None:
    model = engine("gpt2")
    names = ["resid_post.0", "resid_post.2", "final_norm_scale", "logits"]
    got = model.run([Request([7, 3, 99, 64], capture=names)])[0].capture
    norm, head = (model.module.get_submodule(path) for path in ("transformer.ln_f", "lm_head"))
    for point in ("resid_post.0", "resid_post.2"):
        x = got[point]
        with torch.no_grad():
            right = head(norm(x))
        assert torch.allclose(model.unembed(x), right, rtol=0, atol=1e-13)
        borrowed = (x - x.mean(-1, keepdim=True)) / got["final_norm_scale"] * norm.weight + norm.bias  # type: ignore[operator]
        agrees = torch.allclose(head(borrowed), right, rtol=0, atol=1e-9)
        assert agrees == (point == "resid_post.2")
    assert torch.allclose(model.unembed(got["resid_post.2"]), got["logits"], rtol=0, atol=1e-12)
