"""Checkpoints with packed weights: the bits of plain hooks, proofs in the form that is true, and no wrong matrix."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from interp.edits import Add
from interp.engines import doctor
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.load import load_model, wrap
from interp.errors import UserError
from interp.models.anatomy import Mixer, Refusal
from interp.models.tiny import randomize
from interp.models.weights import BlockWeights
from tests.families.loaded import hook_count, readable

D_MODEL, D_MLP, N_HEADS, N_KV_HEADS, D_HEAD, N_LAYERS = 64, 128, 4, 2, 48, 2
"""Widths that bitsandbytes' blocks of 64 divide on every CPU."""
TOKENS = [5, 88, 7, 19, 3]
PACKINGS = ("bitsandbytes-4bit", "bitsandbytes-8bit")
DTYPES = ("float32", "bfloat16")


def quiet(line: str) -> None:
    """A report that nobody reads."""


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "tiny"
    config = LlamaConfig(
        hidden_size=D_MODEL,
        intermediate_size=D_MLP,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        head_dim=D_HEAD,
        attention_bias=True,
        vocab_size=131,
        max_position_embeddings=64,
    )
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        randomize(name, parameter, generator)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[(p, d) for p in PACKINGS for d in DTYPES], ids="-".join)
def engine(request: pytest.FixtureRequest, folder: Path) -> EagerEngine:
    packing, dtype = request.param
    return load_model(folder, device="cpu", dtype=dtype, quantization=packing, prove=False, report=quiet)


def mixer(engine: EagerEngine, layer: int) -> Mixer:
    found = engine.anatomy.blocks[layer].mixer
    assert isinstance(found, Mixer)
    return found


def test_every_claim_holds_and_only_matrices_may_be_missing(engine: EagerEngine, folder: Path) -> None:
    whole = load_model(folder, device="cpu", prove=False, report=quiet)
    claims = doctor.refuse_unproven(engine)
    assert all(claim.holds for claim in claims)
    lost = set(readable(whole, matrices=True, layers=range(N_LAYERS)))
    lost -= set(readable(engine, matrices=True, layers=range(N_LAYERS)))
    assert lost <= {f"head_out.{layer}" for layer in range(N_LAYERS)}
    assert {"o_proj(z) = attn_out", "multiplier · down_proj(mlp_act) = mlp_out"} <= {c.equation for c in claims}


def test_captures_are_the_bits_of_plain_hooks(engine: EagerEngine) -> None:
    model: Any = engine.module
    block, expected, handles = model.model.layers[1], {}, []

    def keep(name: str) -> Any:
        return lambda module, args, output: expected.update(
            {name: (output if isinstance(output, Tensor) else output[0])}
        )

    def keep_input(name: str) -> Any:
        return lambda module, args: expected.update({name: args[0]})

    places = {"attn_out.1": block.self_attn, "mlp_out.1": block.mlp, "resid_post.1": block, "lm_head": model.lm_head}
    inputs = {"z.1": block.self_attn.o_proj, "mlp_act.1": block.mlp.down_proj, "mlp_in.1": block.mlp.gate_proj}
    handles += [module.register_forward_hook(keep(name)) for name, module in places.items()]
    handles += [module.register_forward_pre_hook(keep_input(name)) for name, module in inputs.items()]
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    for handle in handles:
        handle.remove()
    result = engine.run([Request(TOKENS, [*places, *inputs], return_logits=True)])[0]
    assert equal(result.logits, logits)
    for name, tensor in expected.items():
        assert torch.equal(result.capture[name].flatten(1), tensor[0]), name


def test_an_edit_is_that_of_a_plain_hook(engine: EagerEngine) -> None:
    model: Any = engine.module
    vector = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(2)).to(getattr(torch, engine.model.dtype))
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output + vector)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    handle.remove()
    result = engine.run([Request(TOKENS, [], [Add("resid_post.0", vector)], return_logits=True)])[0]
    assert equal(result.logits, expected) and hook_count(model) == 0


def test_a_matrix_is_what_the_module_applies_or_it_is_refused(engine: EagerEngine) -> None:
    output, found = mixer(engine, 1).output, engine.weights(1)
    assert not isinstance(output, Refusal)
    if output.refusal:
        assert isinstance(found, Refusal) and "no matrix is what it computes" in found.reason
        assert "no matrix is what it computes" in engine.support("head_out.1").reason
        return
    assert isinstance(found, BlockWeights) and found.W_O.shape == (D_MODEL, N_HEADS, D_HEAD)
    x = torch.randn(6, N_HEADS * D_HEAD, generator=torch.Generator().manual_seed(1)).to(found.W_O)
    applied, own = x.double() @ found.W_O.flatten(1).double().T, output.module(x).double()
    own = own if found.b_O is None else own - found.b_O.double()
    assert (applied - own).abs().amax() <= 4 * torch.finfo(x.dtype).eps * (x.double().norm(dim=1) * 2).amax()


def test_eight_bits_in_float32_have_no_matrix_and_four_bits_never_show_the_packed_one(folder: Path) -> None:
    eight = load_model(folder, device="cpu", dtype="float32", quantization=PACKINGS[1], prove=False, report=quiet)
    assert isinstance(eight.weights(0), Refusal)
    four = load_model(folder, device="cpu", dtype="bfloat16", quantization=PACKINGS[0], prove=False, report=quiet)
    found, plain = four.weights(0), load_model(folder, device="cpu", prove=False, report=quiet).weights(0)
    assert isinstance(found, BlockWeights) and isinstance(plain, BlockWeights)
    assert found.W_V.shape == plain.W_V.shape
    error = (found.W_V.float() - plain.W_V).norm() / plain.W_V.norm()
    assert 0.02 < error < 0.2  # what four bits lose


def test_a_checkpoint_that_is_packed_already_loads_as_it_is(folder: Path, tmp_path: Path) -> None:
    packing = BitsAndBytesConfig(load_in_8bit=True)
    packed = AutoModelForCausalLM.from_pretrained(folder, quantization_config=packing, dtype=torch.bfloat16)
    packed.save_pretrained(tmp_path / "packed")
    engine = load_model(tmp_path / "packed", device="cpu", report=quiet)
    assert engine.model.dtype == "bfloat16"
    again = wrap(packed)
    a, b = (e.run([Request(TOKENS, ["z.1"], return_logits=True)])[0] for e in (engine, again))
    assert equal(a.logits, b.logits) and torch.equal(a.capture["z.1"], b.capture["z.1"])


def test_the_proofs_of_packed_weights_are_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path))
    proven, prove = [], doctor.prove
    monkeypatch.setattr(doctor, "prove", lambda engine: (proven.append(engine), prove(engine))[1])
    for packing in (None, *PACKINGS, *PACKINGS, None):
        load_model(folder, device="cpu", dtype="bfloat16", quantization=packing, report=quiet)
    assert len(proven) == 3  # each once


def test_generation_with_packed_weights(folder: Path) -> None:
    engine = load_model(folder, device="cpu", dtype="bfloat16", quantization=PACKINGS[0], prove=False, report=quiet)
    result = engine.run([Request(TOKENS, ["resid_post.1"], max_new_tokens=4)])[0]
    expected = engine.module.generate(torch.tensor([TOKENS]), max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    assert result.tokens == expected[0].tolist() and len(result.capture["resid_post.1"]) == len(TOKENS) + 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "Cannot load .*GPTQ.*(optimum|gptqmodel)"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "Cannot load .*AWQ.*gptqmodel"),
        ({"quant_method": "nonesuch"}, "quantised by 'nonesuch', which this transformers does not know"),
    ],
)
def test_a_packing_whose_package_is_missing_names_it(
    config: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    stated = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(UserError, match=message) as error:
        load_model(tmp_path, device="cpu", report=quiet)
    assert "\n" not in str(error.value)


def test_another_name_for_a_packing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="Unknown quantization 'int3'; choose bitsandbytes-4bit or bitsandbytes-8bit"):
        load_model(folder, quantization="int3", report=quiet)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'interp\[quantised\]'"):
        load_model(folder, quantization="bitsandbytes-4bit", report=quiet)


def test_nothing_is_packed_without_being_asked(folder: Path) -> None:
    engine = load_model(folder, device="cpu", prove=False, report=quiet)
    assert mixer(engine, 0).output.packed is None  # type: ignore[union-attr]
