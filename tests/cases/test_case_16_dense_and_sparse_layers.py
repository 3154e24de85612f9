"""TransformerLens#1645: in a model that mixes both, a dense layer has its own neurons and a sparse one refuses."""

import pytest
import torch

from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.errors import PointRefused
from interp.models.tiny import tiny_model
from tests.families.loaded import engine


def model_of(family: str) -> EagerEngine:
    """Layer 0 is dense and layer 1 has experts, in both."""
    return wrap(tiny_model(family, torch.float64)) if family == "deepseek_v2" else engine(family)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_neurons_are_those_of_the_down_projection_or_refused(family: str) -> None:
    model = model_of(family)
    points = ["mlp_in.0", "mlp_pre.0", "mlp_act.0", "mlp_out.0", "mlp_out.1"]
    (result,) = model.run([Request([7, 3, 99], capture=points)])
    width = model.module.config.intermediate_size  # type: ignore[union-attr]
    assert result.capture["mlp_act.0"].shape == (3, width) and width not in (model.model.d_model, 0)
    mlp = model.module.get_submodule("model.layers.0.mlp")
    with torch.no_grad():
        out = mlp.down_proj(result.capture["mlp_act.0"])  # type: ignore[operator]
        pre = mlp.gate_proj(result.capture["mlp_in.0"])  # type: ignore[operator]
    assert torch.allclose(out, result.capture["mlp_out.0"], rtol=0, atol=1e-13)
    assert torch.allclose(pre, result.capture["mlp_pre.0"], rtol=0, atol=1e-13)
    for point in ("mlp_act.1", "mlp_pre.1", "mlp_pre_linear.1"):
        with pytest.raises(PointRefused, match=rf"{point} does not exist here: .*no dense neurons.* mlp_out\.1"):
            model.run([Request([7], capture=[point])])
