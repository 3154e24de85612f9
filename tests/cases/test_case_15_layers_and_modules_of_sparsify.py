"""sparsify#16, #74: `layers.3` is what leaves the block, `layers.3.mlp` its MLP module's own output."""

import torch

from interp.engines.base import Request
from interp.names import point_of
from tests.families.loaded import F32, engine


def test_sparsify_names_are_the_modules_they_spell() -> None:
    model = engine("gemma2", F32)
    found: dict[str, torch.Tensor] = {}
    handles = [
        model.module.get_submodule(f"model.{path}").register_forward_hook(
            lambda m, a, y, path=path: found.setdefault(path, (y if isinstance(y, torch.Tensor) else y[0]).clone())  # type: ignore[misc]
        )
        for path in ("layers.1", "layers.1.mlp")
    ]
    with torch.no_grad():
        states = model.module(
            input_ids=torch.tensor([[7, 3, 99]]), output_hidden_states=True, use_cache=False
        ).hidden_states
    for handle in handles:
        handle.remove()
    block, mlp = point_of("layers.1", "sparsify"), point_of("layers.1.mlp", "sparsify")
    (result,) = model.run([Request([7, 3, 99], capture=[block, mlp])])
    assert torch.equal(result.capture[mlp], found["layers.1.mlp"][0])
    assert torch.equal(result.capture[block], found["layers.1"][0])
    assert torch.equal(result.capture[block], states[2][0])
    assert not torch.allclose(result.capture[mlp], states[2][0], atol=0.1)


def test_the_last_layers_output_is_no_hidden_state() -> None:
    """The last hidden state is normed: it is final_norm, and `layers.2` is what the norm receives."""
    model, last = engine("llama", F32), point_of("layers.2", "sparsify")
    with torch.no_grad():
        output = model.module(input_ids=torch.tensor([[7, 3, 99]]), output_hidden_states=True, use_cache=False)
        (result,) = model.run([Request([7, 3, 99], capture=[last, "final_norm"])])
        norm = model.module.get_submodule("model.norm")
        assert torch.equal(norm(result.capture[last]), output.hidden_states[3][0])
    assert torch.equal(result.capture["final_norm"], output.hidden_states[3][0])
    assert not torch.allclose(result.capture[last], output.hidden_states[3][0], atol=0.1)
