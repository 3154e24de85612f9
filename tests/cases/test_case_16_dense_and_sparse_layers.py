"""TransformerLens#1645: in a model that mixes both, a dense layer has its own neurons and a sparse one refuses."""

import pytest
import torch

from interp.engines.base import Request
from interp.errors import PointRefused
from tests.families.loaded import engine
from tests.families.tiny import D_MLP


def test_neurons_are_those_of_the_down_projection_or_refused() -> None:
    model = engine("qwen3_moe")  # layer 1 has experts
    (result,) = model.run([Request([7, 3, 99], capture=["mlp_act.0", "mlp_out.0", "mlp_out.1"])])
    assert result.capture["mlp_act.0"].shape == (3, D_MLP)
    down = model.module.get_submodule("model.layers.0.mlp.down_proj")
    with torch.no_grad():
        assert torch.allclose(down(result.capture["mlp_act.0"]), result.capture["mlp_out.0"], rtol=0, atol=1e-13)
    for point in ("mlp_act.1", "mlp_pre.1", "mlp_pre_linear.1"):
        with pytest.raises(PointRefused, match=rf"{point} does not exist here: .*no dense neurons.* mlp_out\.1"):
            model.run([Request([7], capture=[point])])
