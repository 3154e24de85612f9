"""TransformerLens#828: contributions to a logit sum to its value before the final tanh, not to it."""

from typing import Any

import torch

from interp.engines.base import Request
from interp.models.anatomy import Head
from tests.families.loaded import engine


def test_direct_contributions_sum_to_the_uncapped_logit() -> None:
    model = engine("gemma2")
    parts = ["resid_pre.0", *(f"{kind}_out_post.{layer}" for layer in range(3) for kind in ("attn", "mlp"))]
    names = [*parts, "final_norm_scale", "lm_head", "logits"]
    got = model.run([Request([7, 3, 99, 64], capture=names)])[0].capture
    gain = model.module.get_submodule("model.norm").weight + 1.0  # type: ignore[operator]
    head: Any = model.module.get_submodule("lm_head")
    directions = head.weight * gain
    z = sum(got[part] / got["final_norm_scale"] @ directions.T for part in parts)  # type: ignore[operator]
    assert torch.allclose(z, got["lm_head"], rtol=0, atol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(5.0 * torch.tanh(z / 5.0), got["logits"], rtol=0, atol=1e-12)  # type: ignore[operator]
    assert (got["lm_head"].abs() > 3).any() and not torch.allclose(got["lm_head"], got["logits"], atol=0.1)
    assert isinstance(model.anatomy.head, Head) and model.anatomy.head.cap == 5.0
