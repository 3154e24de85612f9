"""A model that is split between memory and disk gives, bit for bit, what it gives whole, on one device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from interp.edits import Add, Edit, Replace
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from interp.engines.eager import EagerEngine
from interp.engines.echo import echo
from interp.engines.load import load_model, wrap
from interp.errors import UserError
from interp.models.anatomy import Anatomy, Refusal
from interp.models.parameters import devices_of, kept_elsewhere, stored
from interp.models.resolve import probe_pass
from interp.models.weights import BlockWeights
from tests.families.loaded import PROMPTS, hook_count, readable, writable
from tests.families.tiny import N_LAYERS, build

FAMILIES = ("llama", "gpt2", "gemma3", "bloom", "mixtral")


def quiet(line: str) -> None:
    """A report that nobody reads."""


def spread(model: nn.Module, on_disk: tuple[str, ...] = ("0", "2")) -> dict[str, str]:
    """The middle block in memory; the others, the embedding, the last norm and the head on disk."""
    device_map: dict[str, str] = {}
    for path, module in model.named_modules():
        if not path or any(path.startswith(f"{outer}.") for outer in device_map):
            continue
        name = path.rpartition(".")[2]
        if name.isdigit():
            device_map[path] = "disk" if name in on_disk else "cpu"
        elif not any(module.children()):
            device_map[path] = "disk"
    return device_map


class Both:
    """One checkpoint, loaded whole and loaded split."""

    def __init__(self, family: str, folder: Path, **options: Any) -> None:
        self.model = build(family, torch.float32)
        self.model.save_pretrained(folder / family)  # type: ignore[operator]
        self.path, self.device_map = folder / family, spread(self.model)
        self.whole = load_model(self.path, device="cpu", report=quiet, **options)
        self.split = load_model(
            self.path, device_map=self.device_map, offload_folder=folder / "offload", report=quiet, **options
        )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path: Path) -> Both:
    return Both("llama", tmp_path)


def run(engine: EagerEngine, capture: list[str], edits: tuple[Edit, ...] = (), n: int = 0) -> list[Any]:
    return engine.run([Request(prompt, capture, edits, n, return_logits=True) for prompt in PROMPTS])


def assert_same(whole: EagerEngine, split: EagerEngine, capture: list[str], **options: Any) -> None:
    for a, b in zip(run(whole, capture, **options), run(split, capture, **options), strict=True):
        assert a.tokens == b.tokens and torch.equal(a.logits, b.logits)
        for address in capture:
            assert torch.equal(a.capture[address], b.capture[address]), address
            assert b.capture[address].device == split.device


@pytest.mark.parametrize("family", FAMILIES)
def test_every_point_is_served_and_has_the_same_bits(family: str, tmp_path: Path) -> None:
    both = Both(family, tmp_path)
    assert sum(map(kept_elsewhere, both.split.module.modules())) > 4 and both.split.device == torch.device("cpu")
    points = readable(both.whole, matrices=True)
    assert readable(both.split, matrices=True) == points and writable(both.split) == writable(both.whole)
    assert_same(both.whole, both.split, points)


def test_edits_and_generation_have_the_same_bits(llama: Both) -> None:
    generator = torch.Generator().manual_seed(3)
    for address in writable(llama.whole):
        value = run(llama.whole, [address])[0].capture[address][0]
        edits = (Add(address, torch.randn(value.shape, generator=generator)),)
        assert_same(llama.whole, llama.split, ["resid_post.2"], edits=edits)
    where = Replace("z.1.head-2", torch.randn(10, generator=generator))
    assert_same(llama.whole, llama.split, ["resid_mid.0", "head_out.2"], edits=(where,), n=4)
    assert hook_count(llama.split.module) == 0


def test_weights_and_unembed_are_those_of_the_files(llama: Both) -> None:
    resid = torch.randn(4, llama.whole.model.d_model)
    assert torch.equal(llama.whole.unembed(resid), llama.split.unembed(resid))
    for layer in range(N_LAYERS):
        whole, split = llama.whole.weights(layer), llama.split.weights(layer)
        assert isinstance(whole, BlockWeights) and isinstance(split, BlockWeights)
        for name in ("W_V", "b_V", "W_O", "b_O"):
            assert torch.equal(getattr(whole, name), getattr(split, name)), name
        assert torch.equal(whole.attn.pre.gain, split.attn.pre.gain)  # type: ignore[union-attr]
    assert llama.split.model == llama.whole.model


def test_every_write_is_one(llama: Both) -> None:
    claims = echo(llama.split)
    assert len(claims) > 100 and all(claim.holds for claim in claims)


def test_a_batch_with_a_mask_is_the_same(llama: Both) -> None:
    tokens = torch.tensor([[5, 7, 9, 11], [3, 3, 8, 2]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1]])
    a, b = (run_with_cache(e, tokens, ["resid_post.0"], mask) for e in (llama.whole, llama.split))
    assert torch.equal(a["resid_post.0"].nan_to_num(), b["resid_post.0"].nan_to_num())


def test_a_model_that_accelerate_has_split_already_is_wrapped(llama: Both) -> None:
    again = wrap(llama.split.module)
    assert readable(again, matrices=True) == readable(llama.whole, matrices=True)
    assert again.model.fingerprint == wrap(llama.model).model.fingerprint


def test_the_proofs_of_a_split_model_are_its_own(llama: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    from interp.engines import doctor

    def load(**placed: Any) -> EagerEngine:
        return load_model(llama.path, report=quiet, **placed)

    proven: list[Anatomy] = []
    prove = doctor.prove
    monkeypatch.setattr(doctor, "prove", lambda engine: (proven.append(engine.anatomy), prove(engine))[1])
    load(device="cpu")
    load(device_map=llama.device_map)
    assert not proven  # both were proven by the fixture, and neither took the other's place
    load(device_map=llama.device_map | {"model.layers.1": "disk"})
    assert len(proven) == 1


def test_a_split_that_accelerate_chooses(llama: Both) -> None:
    split = load_model(llama.path, device_map="auto", report=quiet)
    assert_same(llama.whole, split, ["resid_post.1"])


def test_the_probe_holds_few_weights_of_a_model_on_disk(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=192, intermediate_size=320, num_hidden_layers=3, num_attention_heads=6, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    split = LlamaForCausalLM.from_pretrained(tmp_path, device_map=spread(model, ("0", "1", "2")))

    def held(one: nn.Module) -> int:
        trace, _ = probe_pass(one, 64)
        storages = [t.untyped_storage() for t in trace.value._kept if t is not None]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    size = sum(tensor.nbytes for _, tensor in stored(model))
    assert held(model) > size > 4 * held(split)  # what is left are activations


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ({"device": "cpu", "device_map": "auto"}, "Both device='cpu' and a device_map"),
        ({"device_map": "everywhere"}, "Unknown device_map 'everywhere'; choose auto"),
        ({"device_map": {"": "cuda:3"}}, "cuda:3 was asked for"),
    ],
)
def test_a_map_that_cannot_be_is_refused_in_one_sentence(llama: Both, placed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_model(llama.path, report=quiet, **placed)
    assert "\n" not in str(error.value)


def test_where_each_module_is(llama: Both) -> None:
    assert devices_of(llama.split.module) == llama.device_map
    assert devices_of(llama.whole.module) == {}
    assert json.loads(next((llama.path.parent / "cache" / "proofs").glob("*-cpu-*.json")).read_text())["key"]["devices"]
    assert not isinstance(llama.split.weights(0), Refusal)
