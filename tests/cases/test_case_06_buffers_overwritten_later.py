"""nnsight#661: a capture is a copy. Falcon adds attention into the tensor that its MLP returned."""

import torch

from interp.engines.base import Request
from tests.families.loaded import F32, engine


def test_the_mlp_output_is_the_mlp_module_applied_to_its_input() -> None:
    model = engine("falcon", F32)
    (result,) = model.run([Request([7, 3, 99], capture=["mlp_in.1", "mlp_out.1", "mlp_out_post.1", "attn_out.1"])])
    mlp = model.module.get_submodule("transformer.h.1.mlp")
    with torch.no_grad():
        right = mlp(result.capture["mlp_in.1"][None])[0]
    assert torch.equal(result.capture["mlp_out.1"], right)
    assert torch.equal(result.capture["mlp_out_post.1"], right)
    assert result.capture["attn_out.1"].abs().max() > 0.01  # what a reference would have picked up

    before = result.capture["mlp_out.1"].clone()
    model.run([Request([1, 2, 4], capture=["mlp_out.1"])])
    assert torch.equal(result.capture["mlp_out.1"], before)
