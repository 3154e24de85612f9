"""nnsight#661: a capture is a copy. Falcon adds attention into the tensor that its MLP returned."""

import pytest
import torch
from torch import Tensor, nn

from interp.engines.base import Request
from tests.families.loaded import F32, engine

TOKENS, POINTS = [11, 64, 2, 130], ["embeddings", "resid_pre.1", "attn_out.1", "mlp_out.1"]


@pytest.mark.parametrize("family", ["llama", "falcon", "gpt_neox_parallel"])
def test_points_together_are_the_points_alone_and_another_run_changes_none(family: str) -> None:
    model = engine(family, F32)
    (together,) = model.run([Request(TOKENS, capture=POINTS)])
    kept = {point: together.capture[point].clone() for point in POINTS}
    model.run([Request([1, 2, 4], capture=POINTS)])
    for point in POINTS:
        (alone,) = model.run([Request(TOKENS, capture=[point])])
        assert torch.equal(alone.capture[point], kept[point]), point
        assert torch.equal(together.capture[point], kept[point]), point


def test_an_in_place_operation_after_the_module_reaches_no_capture() -> None:
    model = engine("llama", F32)
    mlp = model.module.get_submodule("model.layers.1.mlp")
    clones: list[Tensor] = []
    handles = []

    def late(module: nn.Module, args: tuple) -> None:
        """Hooks that run after ours: one that clones at once, one that overwrites as a fused kernel would."""
        handles.append(module.register_forward_hook(lambda m, a, output: clones.append(output.clone())))
        handles.append(module.register_forward_hook(lambda m, a, output: output.mul_(3.0)))

    first = mlp.register_forward_pre_hook(late)
    try:
        (result,) = model.run([Request(TOKENS, capture=["mlp_out.1", "mlp_out_post.1", "resid_post.1"])])
    finally:
        first.remove()
        for handle in handles:
            handle.remove()
    assert torch.equal(result.capture["mlp_out.1"], clones[0][0])
    assert torch.equal(result.capture["mlp_out_post.1"], clones[0][0])


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
