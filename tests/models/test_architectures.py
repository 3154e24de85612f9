"""A class of one's own is registered, saved, and loaded like any checkpoint, in this process and in any other."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from interp.engines import proof_cache
from interp.engines.base import Request
from interp.engines.load import load_model, wrap
from interp.errors import UserError
from interp.models import architectures, register, save
from interp.models.architectures import REGISTERED, Architecture, architecture_of, register_architecture
from interp.models.checkpoint import Checkpoint, checkpoint_dtype, fingerprint
from interp.models.resolve import resolve
from tests.quick_demo import ROOT, environment
from tests.training.conftest import tiny_tokenizer

MODULE = '''
"""Two blocks of an MLP and of a mean over what came before, on an embedding that the head shares."""

import torch
from torch import nn

from interp.models import register


class Mean(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value = nn.Linear(width, width, bias=False)

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.value(x).cumsum(1) / count


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer = Mean(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Averager(nn.Module):
    def __init__(self, vocabulary, width, inner, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3]))
        self.tenth = torch.tensor(0.1)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


register("averager", Averager)
'''
CONFIG = {"vocabulary": 64, "width": 12, "inner": 20}
CPU = {"device": "cpu", "report": lambda line: None}


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers and imports is gone after it; its caches are its own."""
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    kept = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(kept)
    sys.modules.pop("averager", None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the Python path with a module that registers its class."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "averager.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def averager(home: Path) -> ModuleType:
    import averager  # type: ignore[import-not-found]

    return averager


def made(averager: ModuleType, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return averager.Averager(**CONFIG).eval()


@pytest.fixture
def saved(averager: ModuleType, tmp_path: Path) -> Path:
    save(made(averager), tmp_path / "saved", CONFIG, tiny_tokenizer())
    return tmp_path / "saved"


def forget() -> None:
    """As a new process would begin."""
    REGISTERED.pop("averager")
    sys.modules.pop("averager")


def refused(match: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(UserError, match=match) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


# The round trip.


def test_what_is_saved_is_what_is_loaded(saved: Path, averager: ModuleType) -> None:
    assert {p.name for p in saved.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    stated = json.loads((saved / "config.json").read_text())
    assert stated == {"architecture": "averager", "registered_by": "averager", "dtype": "float32", **CONFIG}
    engine, right = load_model(saved, **CPU), made(averager)
    module: Any = engine.module
    assert type(module) is averager.Averager and not module.training
    assert module.head.weight is module.embed.weight
    for name, tensor in right.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert not any(parameter.requires_grad for parameter in module.parameters())
    tokens = engine.to_tokens("w1 w2 w3")
    assert engine.tokenizer.decode(tokens[0]) == "<s> w1 w2 w3"
    (result,) = engine.run([Request("w1 w2 w3", ["resid_post.1", "logits"])])
    with torch.no_grad():
        assert torch.equal(result.capture["logits"], right(tokens)[0])
    assert engine.model.name == "saved" and engine.model.d_vocab == 64 and engine.model.n_layers == 2


def test_another_process_imports_the_module_that_the_directory_names(saved: Path, home: Path) -> None:
    script = "import sys; from interp import load_model; print(load_model(sys.argv[1], device='cpu').model.fingerprint)"
    command = [sys.executable, "-c", script, str(saved)]
    known = environment() | {"PYTHONPATH": f"{ROOT}:{home}"}
    done = subprocess.run(command, env=known, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.strip() == fingerprint(saved), done.stderr
    points = [sys.executable, "-m", "interp.scripts.main", "points", str(saved)]
    done = subprocess.run(points, env=environment() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "module averager that registers it cannot be imported" in done.stderr and "PYTHONPATH" in done.stderr


def test_weights_come_in_the_dtype_that_is_asked_for(saved: Path) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        module: Any = load_model(saved, dtype=str(dtype), prove=False, **CPU).module
        assert {p.dtype for p in module.parameters()} == {dtype} and module.seen.dtype == torch.long
        assert module.tenth == torch.tensor(0.1, dtype=dtype)
    assert torch.get_default_dtype() == torch.float32


def test_a_config_of_another_build_is_refused(saved: Path) -> None:
    def config(**changes: Any) -> None:
        stated = json.loads((saved / "config.json").read_text()) | changes
        kept = {key: value for key, value in stated.items() if value is not None}
        (saved / "config.json").write_text(json.dumps(kept))

    config(depth=3)
    refused(r"lacks 9 weights that Averager has \(blocks\.2\.", load_model, saved, **CPU)
    config(depth=1)
    refused(r"holds 9 weights that Averager has no place for \(blocks\.1\.", load_model, saved, **CPU)
    config(depth=2, inner=21)
    refused("size mismatch for blocks.0.mlp", load_model, saved, **CPU)
    config(inner=20, heads=2)
    refused("cannot be built from its config .*unexpected keyword argument 'heads'", load_model, saved, **CPU)
    config(heads=None)
    (saved / "model.safetensors").write_bytes(b"\xff" * 50)
    with pytest.raises(UserError, match="not those of Averager"):
        architectures.architecture_of({"architecture": "averager"}).load(saved, CONFIG, torch.float32, print)  # type: ignore[union-attr]


def test_a_save_that_fails_leaves_what_was_there(saved: Path, averager: ModuleType) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise RuntimeError("no tokenizer")

    before = fingerprint(saved)
    with pytest.raises(RuntimeError, match="no tokenizer"):
        save(made(averager, seed=1), saved, CONFIG, Broken())
    assert fingerprint(saved) == before and [p.name for p in saved.parent.iterdir() if "partial" in p.name] == []
    save(made(averager, seed=1), saved, CONFIG)
    assert fingerprint(saved) != before and not (saved / "tokenizer.json").exists()


def test_what_cannot_be_found_again_is_not_saved(averager: ModuleType, tmp_path: Path) -> None:
    class Local(nn.Linear):
        pass

    refused("Local is not registered", save, Local(2, 2), tmp_path / "a", {})
    Local.__module__ = "__main__"
    register("local", Local)
    refused("no other process can import: move it", save, Local(2, 2), tmp_path / "a", {})
    refused("cannot be written as JSON", save, made(averager), tmp_path / "a", {"vocabulary": torch.float32})
    register("read", nn.Embedding, load=lambda folder, config, dtype, report: nn.Embedding(2, 2))
    refused(
        r"does not make this Averager: blocks\.0\.mlp\.0\.bias would be \[21\] and is \[20\]",
        save,
        made(averager),
        tmp_path / "a",
        CONFIG | {"inner": 21},
    )
    refused(
        r"blocks\.1\.mixer\.value\.weight would be missing and is \[12, 12\]",
        save,
        made(averager),
        tmp_path / "a",
        CONFIG | {"depth": 1},
    )
    refused("cannot be built .*'heads'", save, made(averager), tmp_path / "a", CONFIG | {"heads": 1})
    refused("read by a function of its own", save, nn.Embedding(2, 2), tmp_path / "a", {})
    assert not (tmp_path / "a").exists()


# Who reads a directory.


def test_a_name_belongs_to_one_class(averager: ModuleType) -> None:
    register("averager", averager.Averager)
    refused("'averager' is taken by averager.Averager", register, "averager", nn.Linear)
    older = averager.Averager
    exec(MODULE, averager.__dict__)  # as a cell of a notebook that is run again
    assert REGISTERED["averager"].kind is averager.Averager is not older
    with pytest.raises(UserError, match="leave out one"):
        register("both", nn.Linear, build=lambda c: nn.Linear(1, 1), load=lambda f, c, d, r: nn.Linear(1, 1))


def test_a_class_of_a_library_names_the_module_that_registers_it(tmp_path: Path) -> None:
    register("library", nn.Bilinear, registered_by="mine.models")
    save(nn.Bilinear(2, 3, 4), tmp_path / "a", {"in1_features": 2, "in2_features": 3, "out_features": 4})
    assert json.loads((tmp_path / "a" / "config.json").read_text())["registered_by"] == "mine.models"


def test_build_makes_the_module_from_the_config(averager: ModuleType, tmp_path: Path) -> None:
    class Other(averager.Averager):
        pass

    register("other", Other, build=lambda config: Other(**{key: 2 * value for key, value in config.items()}))
    torch.manual_seed(0)
    save(Other(64, 12, 20, 2), tmp_path / "other", {"vocabulary": 32, "width": 6, "inner": 10, "depth": 1})
    module = load_model(tmp_path / "other", prove=False, **CPU).module
    assert type(module) is Other and module.blocks[1].mlp[0].weight.shape == (20, 12)


def test_a_directory_of_nobody_is_refused_with_what_to_do(saved: Path, tmp_path: Path) -> None:
    stated = json.loads((saved / "config.json").read_text())
    forget()
    shutil.rmtree(tmp_path / "code")
    refused("module averager that registers it cannot be imported .*PYTHONPATH", load_model, saved, **CPU)
    (saved / "config.json").write_text(json.dumps(stated | {"registered_by": "json"}))
    refused("importing json registers no such name", load_model, saved, **CPU)
    del stated["registered_by"]
    (saved / "config.json").write_text(json.dumps(stated))
    refused("'averager', which nobody has registered: import the Python module", load_model, saved, **CPU)


def test_a_module_that_breaks_on_import_is_said_with_its_reason(saved: Path, home: Path) -> None:
    forget()
    (home / "averager.py").write_text("raise ZeroDivisionError('no such thing')")
    refused(r"cannot be imported \(no such thing\)", load_model, saved, **CPU)


def test_nothing_from_the_hub_is_imported(saved: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    (home / "averager.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(saved))
    refused("comes from the hub names code .averager. and never has it imported", load_model, "some/model", **CPU)
    assert "averager" not in sys.modules
    (home / "averager.py").write_text(MODULE)
    __import__("averager")
    assert load_model("some/model", prove=False, **CPU).model.name == "some/model"


def test_an_installed_package_offers_its_architectures(
    saved: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    asked: list[dict[str, str]] = []

    def entry_points(**wanted: str) -> list[EntryPoint]:
        asked.append(wanted)
        return [EntryPoint("averager", "averager", "interp.architectures")]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    found = architecture_of(json.loads((saved / "config.json").read_text()))  # even where it may come from the hub
    assert found is not None and found.kind.__name__ == "Averager"
    assert asked == [{"group": "interp.architectures", "name": "averager"}]


def test_a_config_without_a_name_is_recognised(averager: ModuleType, saved: Path) -> None:
    REGISTERED.pop("averager")
    register("averager", averager.Averager, recognises=lambda config: {"vocabulary", "inner"} <= set(config))
    (saved / "config.json").write_text(json.dumps(CONFIG))
    assert load_model(saved, prove=False, **CPU).model.family == "Averager"
    assert architecture_of({"model_type": "llama"}) is None
    assert architecture_of({"model_type": "llama", "architecture": "a word of somebody else's"}) is None
    assert architecture_of({"vocabulary": 3}) is None


# What a load depends on.


def llama(folder: Path, seed: int, tokenizer: bool = False) -> Path:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def joined(folder: Path, **places: str) -> Path:
    """A directory without weights of its own, whose two parts are folders that its config names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architecture": "joined", **places}))
    return folder


@pytest.fixture
def second_of_two(tmp_path: Path) -> None:
    """An architecture that runs the second of its two parts."""

    def load(folder: Path, config: Any, dtype: torch.dtype, report: Any) -> nn.Module:
        return LlamaForCausalLM.from_pretrained(folder / config["late"], dtype=dtype)

    register_architecture(
        Architecture(
            "joined",
            LlamaForCausalLM,
            load,
            anatomy=None,
            parts=lambda folder, config: [folder / config["early"], folder / config["late"]],
            recognises=lambda config: False,
        )
    )


@pytest.mark.usefixtures("second_of_two")
def test_parts_give_dtype_and_tokenizer_where_the_folder_does_not(tmp_path: Path) -> None:
    llama(tmp_path / "a", 0, tokenizer=True)
    llama(tmp_path / "b", 1)
    folder = joined(tmp_path / "joined", early="../a", late="../b")
    assert checkpoint_dtype(Checkpoint(folder, "joined", None, "directory")) == "bfloat16"
    engine = load_model(folder, prove=False, **CPU)
    assert engine.model.dtype == "bfloat16" and engine.to_tokens("w1").tolist() == [[1, 5]]
    tiny_tokenizer(bos=False).save_pretrained(folder)
    assert load_model(folder, prove=False, **CPU).to_tokens("w1").tolist() == [[5]]


@pytest.mark.usefixtures("second_of_two")
def test_a_fingerprint_covers_the_parts_and_not_where_they_lie(tmp_path: Path) -> None:
    llama(tmp_path / "a", 0)
    llama(tmp_path / "b", 1)
    shutil.copytree(tmp_path / "b", tmp_path / "elsewhere")
    first = fingerprint(joined(tmp_path / "one", early="../a", late="../b"))
    assert fingerprint(joined(tmp_path / "two", early="../a", late=str(tmp_path / "elsewhere"))) == first
    assert fingerprint(joined(tmp_path / "three", early="../b", late="../a")) != first
    llama(tmp_path / "a", 2)
    assert fingerprint(tmp_path / "one") != first


@pytest.mark.usefixtures("second_of_two")
def test_proofs_are_kept_for_these_parts_and_this_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[dict[str, str]] = []
    proven = proof_cache.proven
    monkeypatch.setattr(proof_cache, "proven", lambda key, *rest: (keys.append(key), proven(key, *rest))[1])
    llama(tmp_path / "a", 0)
    llama(tmp_path / "b", 1)
    folder = joined(tmp_path / "joined", early="../a", late="../b")
    for _ in range(2):
        load_model(folder, **CPU)
    assert keys[0] == keys[1]
    (tmp_path / "a" / "model.safetensors").touch()
    load_model(folder, **CPU)
    assert {name for name in keys[2] if keys[2][name] != keys[1][name]} == {"files"}


def test_proofs_are_kept_for_this_anatomy(saved: Path, averager: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "code" / "written.py"
    source.write_text("def anatomy(module): return None\n")
    module = made(averager)
    namespace: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    plain = REGISTERED["averager"]
    by_hand = Architecture("averager", plain.kind, plain.load, namespace["anatomy"], plain.parts, plain.recognises)
    keys = [proof_cache.key_of(module, [saved], "f", architecture) for architecture in (plain, by_hand, by_hand)]
    source.write_text("def anatomy(module): return 1\n")
    keys.append(proof_cache.key_of(module, [saved], "f", by_hand))
    codes = [key["model_code"] for key in keys]
    assert codes[0] != codes[1] == codes[2] != codes[3]
    assert all(key | {"model_code": ""} == keys[0] | {"model_code": ""} for key in keys)
    type(module).__module__ = "gone"  # a class of which no file is found is proven at every load
    first, second = (proof_cache.key_of(module, [saved], "f", plain)["model_code"] for _ in range(2))
    assert first != second


# Random weights.


def test_weights_that_no_file_has_are_the_same_at_every_load_and_said_once(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    said: list[str] = []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine = load_model(saved, device="cpu", report=said.append, prove=False)
    assert torch.equal(torch.get_rng_state(), before)
    (told,) = [line for line in said if "initialised randomly" in line]
    assert told == f"{saved} has no model.safetensors: Averager is initialised randomly."
    torch.manual_seed(6)
    again = load_model(saved, device="cpu", report=said.append, prove=False, random_init=True)
    assert sum("initialised randomly" in line for line in said) == 1
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name])


def test_a_config_of_transformers_alone_is_a_model_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = llama(tmp_path / "tiny", 0)
    kept = load_model(folder, prove=False, random_init=True, **CPU).module.state_dict()
    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert torch.equal(kept["lm_head.weight"], stored["lm_head.weight"])
    (folder / "model.safetensors").unlink()
    refused("no weights; put model.safetensors beside it, or .*--random_init", load_model, folder, **CPU)
    first = load_model(folder, random_init=True, dtype="float32", **CPU)
    torch.manual_seed(7)
    second = load_model(folder, random_init=True, dtype="float32", **CPU)
    assert first.model.fingerprint == second.model.fingerprint and first.support("resid_mid.1").writable
    one, other = (engine.module.get_parameter("lm_head.weight") for engine in (first, second))
    assert torch.equal(one, other)
    refused("whole and on one device", load_model, folder, random_init=True, device_map="auto", report=print)
    (folder / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    refused("Cannot build tiny", load_model, folder, random_init=True, **CPU)


def test_a_custom_architecture_is_neither_split_nor_packed(saved: Path) -> None:
    from transformers import BitsAndBytesConfig

    refused(
        "saved is of the architecture averager, and its weights are made here",
        load_model,
        saved,
        device_map="auto",
        report=print,
    )
    packed = BitsAndBytesConfig(load_in_8bit=True)
    refused("leave out device_map and quantization", load_model, saved, quantization=packed, **CPU)


# An Anatomy that is handed over.


def test_a_registered_anatomy_is_used_and_one_that_is_given_goes_first(averager: ModuleType) -> None:
    module = made(averager)
    asked: list[nn.Module] = []

    def written(module: nn.Module) -> Any:
        asked.append(module)
        return resolve(module, 64)

    REGISTERED.pop("averager")
    register("averager", averager.Averager, anatomy=written)
    assert wrap(module).support("mlp_act.1").writable and asked == [module]
    own = resolve(module, 64)
    engine = wrap(module, anatomy=own)
    assert asked == [module] and engine.anatomy.blocks is own.blocks and not own.refused
    with pytest.raises(UserError, match="written for another module"):
        wrap(made(averager), anatomy=own)


def test_a_module_with_a_config_of_its_own_is_told_from_others_by_it(averager: ModuleType) -> None:
    prints = []
    for config in ({"a": 1}, {"a": 2}, ModuleType("named")):
        module: Any = made(averager)
        module.config = config
        prints.append(wrap(module, prove=False).model.fingerprint)
    assert len(set(prints)) == 3


def test_the_package_of_models_names_what_it_has() -> None:
    import interp.models as models

    assert {"register", "save", "SplitLlama", "SplitLlamaConfig"} <= set(dir(models))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = models.nothing  # type: ignore[attr-defined]
