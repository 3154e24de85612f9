"""SplitLlama computes what its two halves compute by hand, reads no more than it uses, and says what is wrong."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from interp.engines.kv_cache import buffered_cache, plain_layers
from interp.errors import UserError
from interp.models import split_llama, split_llama_files
from interp.models.architectures import REGISTERED
from interp.models.attention import AttentionCall, observed
from interp.models.checkpoint import Checkpoint
from interp.models.split_llama import SplitLlama
from interp.models.split_llama_files import SplitLlamaConfig
from interp.models.tiny import randomize

D_VOCAB, D_FIRST, D_LAST, N_FIRST, N_LAST = 97, 48, 66, 3, 2
NARROW: dict[str, Any] = {
    "vocab_size": D_VOCAB,
    "hidden_size": D_FIRST,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 3,
    "eos_token_id": 5,
    "initializer_range": 0.04,
}
WIDE: dict[str, Any] = {
    "vocab_size": D_VOCAB,
    "hidden_size": D_LAST,
    "intermediate_size": 104,
    "num_hidden_layers": 4,
    "num_attention_heads": 11,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 7,
    "eos_token_id": 8,
    "attention_bias": True,
    "initializer_range": 0.09,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
PROMPTS = [[11, 94, 30, 52, 7, 61, 18], [45, 2, 83], [70, 29, 5, 66, 13]]


def llama(fields: dict[str, Any], seed: int = 0) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        randomize(name, parameter, generator)
    return model.requires_grad_(False)


def stated(folder: Path, **changes: Any) -> Path:
    """A SplitLlama directory of the checkpoints `narrow` and `wide` beside it."""
    folder.mkdir(exist_ok=True)
    keys = {
        "path8b": "../narrow",
        "path70b": "../wide",
        "num_layers_8": N_FIRST,
        "num_layers_70": N_LAST,
        "vocab_size": D_VOCAB,
        "mlp": False,
        "architecture": "split_llama",
        "note": "of no meaning",
    }
    keys = {name: value for name, value in (keys | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def adapter(mlp: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    if not mlp:
        return {"weight": drawn(D_LAST, D_FIRST)}
    return {
        "0.weight": drawn(D_LAST, D_FIRST),
        "0.bias": drawn(D_LAST),
        "2.weight": drawn(D_LAST, D_LAST),
        "2.bias": drawn(D_LAST),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `narrow` and `wide`, and `linear` and `mlp` made of them, each with an adapter."""
    folder = tmp_path_factory.mktemp("split")
    llama(NARROW, 1).save_pretrained(folder / "narrow")
    llama(WIDE, 2).save_pretrained(folder / "wide")
    for mlp, name in ((False, "linear"), (True, "mlp")):
        save_file(adapter(mlp), stated(folder / name, mlp=mlp) / "adapter.safetensors")
    return folder


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """The same, to change."""
    return Path(shutil.copytree(saved, tmp_path.resolve() / "own"))


def silent(line: str) -> None:
    raise AssertionError(f"nothing is to be said, but: {line}")


def load(folder: Path, dtype: torch.dtype | None = None, report: Callable[[str], None] = silent) -> SplitLlama:
    return SplitLlama(SplitLlamaConfig(model_path=folder), dtype=dtype, report=report).requires_grad_(False)


def attentions(model: SplitLlama) -> list[Any]:
    layers: list[Any] = [*model.layers_first, *model.layers_last]
    return [layer.self_attn for layer in layers]


def batch(n_pos: int = 9) -> Tensor:
    return torch.randint(0, D_VOCAB, (2, n_pos), generator=torch.Generator().manual_seed(4))


def refusal(folder: Path) -> str:
    """The sentence that this directory is refused with."""
    with pytest.raises(UserError) as raised:
        load(folder, report=lambda line: None)
    sentence = str(raised.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def trim(file: Path, keep: Callable[[str], bool]) -> None:
    save_file({name: tensor for name, tensor in load_file(file).items() if keep(name)}, file)


# What it computes.


@pytest.mark.parametrize("n_first", (1, 3))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_two_halves_of_one_checkpoint_with_an_identity_between_are_that_checkpoint(
    own: Path, dtype: torch.dtype, n_first: int
) -> None:
    folder = stated(own / "one", path8b="../wide", path70b="../wide", num_layers_8=n_first, num_layers_70=4 - n_first)
    save_file({"weight": torch.eye(D_LAST)}, folder / "adapter.safetensors")
    split, whole = load(folder, dtype), LlamaForCausalLM.from_pretrained(own / "wide", dtype=dtype)
    whole.requires_grad_(False)  # as with the other, for torch multiplies in another order where gradients are wanted
    ids, mask = batch(), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    for given in ({}, {"attention_mask": mask}, {"logits_to_keep": 2}, {"logits_to_keep": torch.tensor([1, 7])}):
        assert torch.equal(split(ids, **given).logits, whole(ids, **given).logits)
    one, other = split(ids), whole(ids)
    for _ in range(4):
        assert torch.equal(one.logits, other.logits)
        ids = one.logits[:, -1:].argmax(-1)
        one, other = split(ids, cache=one.cache), whole(ids, cache=other.cache)
    assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("mlp", (False, True))
def test_unlike_halves_give_what_they_give_one_after_the_other(saved: Path, mlp: bool) -> None:
    ids = batch(30)
    early, late = (LlamaForCausalLM.from_pretrained(saved / name) for name in ("narrow", "wide"))
    x = early.model(ids, output_hidden_states=True).hidden_states[N_FIRST]
    weights = adapter(mlp)
    if mlp:
        x = nn.functional.linear(x, weights["0.weight"], weights["0.bias"]).relu()
        x = nn.functional.linear(x, weights["2.weight"], weights["2.bias"])
    else:
        x = nn.functional.linear(x, weights["weight"])
    late.model.layers = late.model.layers[-N_LAST:]
    assert torch.equal(load(saved / ("mlp" if mlp else "linear"))(ids).logits, late(inputs_embeds=x).logits)


def test_steps_with_a_cache_give_what_the_whole_gives_without(saved: Path) -> None:
    model, ids = load(saved / "linear", torch.float64), batch(8)
    whole = model(ids, use_cache=False)
    assert whole.cache is None
    caches = (None, DynamicCache(), buffered_cache((True,) * (N_FIRST + N_LAST), 8))
    for cache in caches:
        output = model(ids[:, :5], cache=cache, use_cache=True)
        logits = [output.logits]
        for at in (5, 6, 7):
            output = model(ids[:, at : at + 1], past_key_values=output.cache)
            logits.append(output.logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), whole.logits)


def test_the_cache_counts_layers_through_both_halves(saved: Path) -> None:
    model = load(saved / "linear")
    assert [one.layer_idx for one in attentions(model)] == list(range(N_FIRST + N_LAST))
    cache = model(batch(6)).cache
    assert plain_layers(cache) == (True,) * (N_FIRST + N_LAST)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(2, 2, 6, 10)] * N_FIRST + [(2, 1, 6, 14)] * N_LAST


@pytest.mark.parametrize("side", ("left", "right"))
def test_prompts_in_a_padded_batch_give_what_they_give_alone(saved: Path, side: str) -> None:
    model, width = load(saved / "mlp", torch.float64), max(map(len, PROMPTS))
    ids, mask = torch.zeros(len(PROMPTS), width, dtype=torch.long), torch.zeros(len(PROMPTS), width, dtype=torch.long)
    columns = [slice(width - len(p), width) if side == "left" else slice(0, len(p)) for p in PROMPTS]
    for row, (prompt, where) in enumerate(zip(PROMPTS, columns, strict=True)):
        ids[row, where], mask[row, where] = torch.tensor(prompt), 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    for row, (prompt, where) in enumerate(zip(PROMPTS, columns, strict=True)):
        torch.testing.assert_close(logits[row, where], model(torch.tensor([prompt])).logits[0])


def test_each_half_attends_by_its_own_config(saved: Path) -> None:
    model, ids = load(saved / "linear", torch.float64), batch()
    halves = [model.config.first] * N_FIRST + [model.config.last] * N_LAST
    assert all(one.config is half for one, half in zip(attentions(model), halves, strict=True))
    plain, seen = model(ids).logits, []

    def watch(module: nn.Module, call: AttentionCall) -> None:
        assert call.query is not None
        seen.append((module, call.query.shape[1:]))

    with observed(model, watch):
        torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)
    shapes = [(6, 9, 10)] * N_FIRST + [(11, 9, 14)] * N_LAST
    assert seen == [(attention, torch.Size(shape)) for attention, shape in zip(attentions(model), shapes, strict=True)]
    assert {half._attn_implementation for half in (model.config, *halves)} == {"sdpa"}
    for half in (model.config.first, model.config.last):  # what one takes as a mask would be wrong for the other
        half._attn_implementation = "eager"
        torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)
        half._attn_implementation = "sdpa"
    model.config._attn_implementation = "eager"
    assert {half._attn_implementation for half in halves} == {"eager"}
    torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)


def test_it_says_of_itself_what_an_engine_asks(saved: Path) -> None:
    model = load(saved / "mlp")
    config = model.config
    assert (config.model_type, config.vocab_size, config.num_hidden_layers) == ("split_llama", D_VOCAB, 5)
    assert config.max_position_embeddings == 64
    assert (config.bos_token_id, config.eos_token_id) == (3, 5)
    assert model.generation_config.eos_token_id == 5
    assert model.get_input_embeddings() is model.embed_tokens and model.get_output_embeddings() is model.lm_head
    assert not model.training
    assert json.dumps(config.to_dict(), default=str)
    assert [name for name, _ in model.named_children()] == [
        "embed_tokens",
        "layers_first",
        "adapter",
        "layers_last",
        "norm",
        "lm_head",
        "rotary_first",
        "rotary_last",
    ]


def test_where_text_ends_is_what_the_first_checkpoint_says_of_generation(own: Path) -> None:
    (own / "narrow" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.6}))
    model = load(own / "linear")
    assert model.generation_config.eos_token_id == [5, 6]
    model.save_pretrained(own / "out")
    assert load(own / "out").generation_config.eos_token_id == [5, 6]


# What it reads.


def test_the_dtype_is_the_first_checkpoints_unless_told(own: Path) -> None:
    llama(NARROW, 1).bfloat16().save_pretrained(own / "narrow")
    assert {p.dtype for p in load(own / "mlp").parameters()} == {torch.bfloat16}
    model = load(own / "mlp", torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.config.dtype == torch.float64
    assert model.rotary_last.inv_freq.dtype == torch.float32


def test_only_what_is_used_has_to_be_there(own: Path) -> None:
    before = load(own / "linear")(batch()).logits
    last_layers = ("model.layers.2.", "model.layers.3.", "model.norm.", "lm_head.")
    first_layers = ("model.embed_tokens.", *(f"model.layers.{i}." for i in range(N_FIRST)))
    trim(own / "wide" / "model.safetensors", lambda name: name.startswith(last_layers))
    trim(own / "narrow" / "model.safetensors", lambda name: name.startswith(first_layers))
    assert torch.equal(load(own / "linear")(batch()).logits, before)


@pytest.mark.parametrize("kind", ("shards", "bin", "old bin"))
def test_weights_may_lie_in_shards_or_in_pickles(own: Path, kind: str) -> None:
    before = load(own / "linear")(batch()).logits
    for name, fields, seed in (("narrow", NARROW, 1), ("wide", WIDE, 2)):
        shutil.rmtree(own / name)
        model = llama(fields, seed)
        model.save_pretrained(own / name, max_shard_size="60KB" if kind == "shards" else "5GB")
        if kind == "shards":
            assert len(list((own / name).glob("*.safetensors"))) > 2
            continue
        (own / name / "model.safetensors").unlink()
        names = sorted(model.state_dict())
        for shard in range(2):
            half = {name: model.state_dict()[name] for name in names[shard::2]}
            file = own / name / f"pytorch_model-0000{shard + 1}-of-00002.bin"
            torch.save(half, file, _use_new_zipfile_serialization=kind == "bin")
    assert torch.equal(load(own / "linear")(batch()).logits, before)


def test_a_tied_head_is_the_second_checkpoints_embedding(own: Path) -> None:
    llama(WIDE | {"tie_word_embeddings": True}, 3).save_pretrained(own / "wide")
    stored = load_file(own / "wide" / "model.safetensors")
    assert "lm_head.weight" not in stored
    model = load(own / "linear")
    assert torch.equal(model.lm_head.weight, stored["model.embed_tokens.weight"])
    assert model.lm_head.weight.shape == (D_VOCAB, D_LAST) and model.embed_tokens.weight.shape == (D_VOCAB, D_FIRST)
    model.save_pretrained(own / "out")
    assert torch.equal(load(own / "out")(batch()).logits, model(batch()).logits)


def test_checkpoints_are_found_beside_the_config_in_the_home_folder_and_anywhere(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(own / "linear")(batch()).logits
    monkeypatch.setenv("HOME", str(own))
    monkeypatch.chdir(own)
    for first in ("../narrow", "~/narrow", str(own / "narrow"), "../linear/../narrow"):
        folder = stated(own / "linear", path8b=first)
        assert torch.equal(load(folder)(batch()).logits, before)
    assert torch.equal(load(Path("linear"))(batch()).logits, before)
    assert torch.equal(load(Path("~/linear"))(batch()).logits, before)
    # A folder of that name in the directory one happens to be in is not meant.
    assert f"there is no directory {own / 'linear' / 'narrow'}" in refusal(stated(own / "linear", path8b="narrow"))


def test_a_name_that_is_no_folder_is_resolved_like_any_models(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve(model: str | Path, report: Callable[[str], None]) -> Checkpoint:
        asked.append(model)
        return Checkpoint(own / "narrow", str(model), None, "packaged")

    monkeypatch.setattr(split_llama_files, "resolve", resolve)
    before = load(own / "linear")(batch()).logits
    assert not asked
    (own / "linear" / "some.gguf").write_bytes(b"GGUF")
    for name, wanted in (("smollm2-135m-instruct", "smollm2-135m-instruct"), ("some.gguf", own / "linear/some.gguf")):
        assert torch.equal(load(stated(own / "linear", path8b=name))(batch()).logits, before)
        assert asked.pop() == wanted


# What it draws where there is nothing to read.


def bare(folder: Path, *parts: str) -> Path:
    for part in parts:
        (folder / part).unlink()
    return folder


NARROW_FILE, WIDE_FILE, ADAPTER = "narrow/model.safetensors", "wide/model.safetensors", "linear/adapter.safetensors"


def test_what_is_drawn_is_said_once_per_part_unless_it_is_asked_for(own: Path, caplog: Any) -> None:
    said: list[str] = []
    bare(own, NARROW_FILE, WIDE_FILE, ADAPTER)
    SplitLlama(SplitLlamaConfig(own / "linear"), report=said.append)
    wanted = ("narrow (path8b) holds no weights: the embedding and the first 3 layers",)
    wanted += ("wide (path70b) holds no weights: the last 2 layers, the final norm and the head", "the adapter")
    assert len(said) == 3
    assert all(words in line and "initialised randomly" in line for words, line in zip(wanted, said, strict=True))
    assert not any("\n" in line for line in said)
    SplitLlama(SplitLlamaConfig(own / "linear", random_init=True), report=silent)
    with caplog.at_level(logging.INFO, logger="interp"):
        SplitLlama(SplitLlamaConfig(own / "linear"))
    assert caplog.messages == said


@pytest.mark.parametrize("part", (NARROW_FILE, WIDE_FILE, ADAPTER))
def test_parts_that_are_there_are_read_where_another_is_not(own: Path, part: str) -> None:
    before, said = load(own / "linear").state_dict(), []
    model = load(bare(own, part) / "linear", report=said.append)
    assert len(said) == 1
    starts = {NARROW_FILE: ("embed", "layers_first"), WIDE_FILE: ("layers_last", "norm", "lm_"), ADAPTER: ("adapter",)}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith(starts[part])


@pytest.mark.parametrize("mlp", (False, True))
def test_random_weights_are_drawn_as_transformers_draws_them_and_repeat(own: Path, mlp: bool) -> None:
    bare(own, NARROW_FILE, WIDE_FILE, ADAPTER, "mlp/adapter.safetensors")
    folder, drawn = own / ("mlp" if mlp else "linear"), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(SplitLlama(SplitLlamaConfig(folder, random_init=True), dtype=torch.float64))
    one, same, other = (model.state_dict() for model in drawn)
    for name, tensor in one.items():
        assert torch.equal(tensor, same[name])
        if "norm" in name:
            assert (tensor == 1).all()
        elif name.endswith("bias"):
            assert (tensor == 0).all()
        else:
            assert not torch.equal(tensor, other[name])
            spread = 0.04 if name.startswith(("embed", "layers_first")) else 0.09
            assert tensor.std().item() == pytest.approx(spread, rel=0.15)
    assert drawn[0](batch()).logits.isfinite().all()


# What it writes.


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", ("linear", "mlp"))
def test_what_is_saved_needs_nothing_else_and_gives_the_same(own: Path, kind: str, dtype: torch.dtype) -> None:
    model = load(own / kind, dtype)
    before = model(batch()).logits
    (own / "out").mkdir()
    model.save_pretrained(own / "out")
    for folder in ("narrow", "wide", "linear", "mlp"):
        shutil.rmtree(own / folder)
    assert {path.name for path in own.iterdir()} == {"out"}
    moved = (own / "out").rename(own / "moved")
    again = load(moved)
    assert torch.equal(again(batch()).logits, before)
    assert again.config.dtype == dtype
    assert json.loads((moved / "config.json").read_text()) == {
        "architecture": "split_llama",
        "path8b": "first",
        "path70b": "last",
        "num_layers_8": N_FIRST,
        "num_layers_70": N_LAST,
        "vocab_size": D_VOCAB,
        "mlp": kind == "mlp",
    }
    for half, n_layers, others in (("first", N_FIRST, {"embed_tokens"}), ("last", N_LAST, {"norm", "lm_head"})):
        assert json.loads((moved / half / "config.json").read_text())["num_hidden_layers"] == n_layers
        names = load_file(moved / half / "model.safetensors")
        layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
        assert layers == {str(i) for i in range(n_layers)}
        rest = {name.removeprefix("model.").split(".")[0] for name in names if not name.startswith("model.layers.")}
        assert rest == others


def test_a_folder_that_holds_something_is_not_replaced(own: Path) -> None:
    model = load(own / "linear")
    with pytest.raises(UserError, match=r"linear exists already; give save_pretrained a new folder"):
        model.save_pretrained(own / "linear")
    assert (own / "linear" / "config.json").exists()


def test_a_save_that_fails_leaves_nothing(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = load(own / "linear"), sorted(own.iterdir())

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(split_llama, "copy_tokenizer", full)
    with pytest.raises(OSError, match="No space"):
        model.save_pretrained(own / "out")
    assert sorted(own.iterdir()) == before


def test_an_adapter_is_saved_alone(own: Path) -> None:
    model = load(own / "mlp")
    for parameter in model.adapter.parameters():
        parameter.mul_(1.5)
    model.save_adapter(own / "mlp")
    assert sorted(path.name for path in (own / "mlp").iterdir()) == ["adapter.safetensors", "config.json"]
    again = load(own / "mlp")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert not torch.equal(again.adapter.get_parameter("0.bias"), adapter(True)["0.bias"])


def words(folder: Path, *vocabulary: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=vocabulary[0]).save_pretrained(folder)


def test_the_tokenizer_is_the_first_models_unless_one_lies_beside_the_config(own: Path) -> None:
    assert load(own / "linear").tokenizer() is None
    words(own / "wide", "?", "wrong")
    assert load(own / "linear").tokenizer() is None
    words(own / "narrow", "?", "one", "two")
    assert load(own / "linear").tokenizer()("two one")["input_ids"] == [2, 1]
    load(own / "linear").save_pretrained(own / "out")
    assert load(own / "out").tokenizer()("two one")["input_ids"] == [2, 1]
    words(own / "linear", "?", "two", "one")
    assert load(own / "linear").tokenizer()("two one")["input_ids"] == [1, 2]
    load(own / "linear").save_pretrained(own / "out of its own")
    assert load(own / "out of its own").tokenizer()("two one")["input_ids"] == [1, 2]


# What it refuses.

CONFIG_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "a key is missing": ({"num_layers_70": None}, "{file} has no key 'num_layers_70', which a SplitLlama needs."),
    "a number in quotes": ({"num_layers_8": "3"}, '{file}: num_layers_8 must be a whole number, not "3".'),
    "true is no number": ({"num_layers_8": True}, "{file}: num_layers_8 must be a whole number, not true."),
    "a fraction": ({"vocab_size": 97.0}, "{file}: vocab_size must be a whole number, not 97.0."),
    "a number for true": ({"mlp": 1}, "{file}: mlp must be true or false, not 1."),
    "a path is a list": ({"path8b": ["x"]}, '{file}: path8b must be a path or a model\'s name in quotes, not ["x"].'),
    "too many early layers": ({"num_layers_8": 6}, "{file}: num_layers_8 is 6, but path8b ({narrow}) has 5 layers."),
    "too many late layers": ({"num_layers_70": 9}, "{file}: num_layers_70 is 9, but path70b ({wide}) has 4 layers."),
    "no early layer": ({"num_layers_8": 0}, "{file}: num_layers_8 is 0; at least 1 layer of each model is needed."),
    "no late layer": ({"num_layers_70": -1}, "{file}: num_layers_70 is -1; at least 1 layer of each model is needed."),
    "another vocabulary": (
        {"vocab_size": 96},
        "{file}: vocab_size is 96, but path8b ({narrow}) has 97 and path70b ({wide}) has 97; all three must be equal.",
    ),
    "no such folder": ({"path70b": "./gone"}, "{file}: path70b is './gone', but there is no directory {linear}/gone."),
    "an absolute path": ({"path8b": "/no/such"}, "{file}: path8b is '/no/such', but there is no directory /no/such."),
    "no config there": (
        {"path8b": ".."},
        "{file}: path8b is '..', but the directory {own} holds no config.json.",
    ),
}


@pytest.mark.parametrize("case", CONFIG_ERRORS)
def test_a_config_that_does_not_fit_is_refused_in_one_sentence(own: Path, case: str) -> None:
    changes, sentence = CONFIG_ERRORS[case]
    folder = stated(own / "linear", **changes)
    places = {"own": own, "linear": folder, "narrow": own / "narrow", "wide": own / "wide"}
    assert refusal(folder) == sentence.format(file=folder / "config.json", **places)


def test_a_name_that_no_model_has_is_refused_with_all_that_was_tried(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str, **_: object) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    sentence = refusal(stated(own / "linear", path8b="some/llama"))
    assert sentence.startswith(f"{own / 'linear' / 'config.json'}: path8b is 'some/llama', but there is no directory ")
    assert "offline" in sentence and "smollm2-135m-instruct" in sentence


def test_a_folder_without_config_is_no_split_llama(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is no checkpoint directory: it has no config.json."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "mistral"}, "whose model_type is 'mistral'; a SplitLlama is made of two Llama checkpoints"),
        ({"quantization_config": {"quant_method": "x"}}, "whose weights are quantised; give one that is not"),
        ({"vocab_size": 131}, "vocab_size is 97, but path8b"),
        ({"hidden_size": "wide"}, "wide/config.json is no valid Llama config"),
        ({"hidden_act": "no such function"}, "wide/config.json is no valid Llama config"),
        ({"intermediate_size": 90}, "mlp.gate_proj.weight as [104, 66], but its config.json asks for [90, 66]"),
        ({"mlp_bias": True}, "(path70b) lacks 6 of the 34 weights that are needed of it, model.layers.2.mlp."),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(
    own: Path, changes: dict[str, Any], sentence: str
) -> None:
    file = own / "wide" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert sentence in refusal(own / "linear")


def test_weights_that_are_missing_or_cut_short_are_named(own: Path) -> None:
    file = own / "wide" / "model.safetensors"
    whole = file.read_bytes()
    trim(file, lambda name: name != "model.layers.3.mlp.up_proj.weight")
    sentence = refusal(own / "linear")
    assert f"{own / 'wide'} (path70b) lacks 1 of the 28 weights" in sentence
    assert "model.layers.3.mlp.up_proj.weight" in sentence
    file.write_bytes(whole[:-100])
    assert "wide/model.safetensors cannot be read" in refusal(own / "linear")
    file.unlink()
    (own / "wide" / "pytorch_model.bin").write_bytes(b"no pickle")
    assert "wide/pytorch_model.bin cannot be read" in refusal(own / "linear")


def test_an_adapter_that_does_not_fit_is_refused_with_both_shapes(own: Path) -> None:
    file = own / "linear" / "adapter.safetensors"
    for weights, said in (
        ({"weight": torch.zeros(D_FIRST, D_LAST)}, "weight [48, 66]"),
        (adapter(True), "0.bias [66], 0.weight [66, 48], 2.bias [66], 2.weight [66, 66]"),
    ):
        save_file(weights, file)
        assert refusal(own / "linear") == f"{file} holds {said}, but this adapter is weight [66, 48]."
    file.write_bytes(b"cut")
    assert f"{file} cannot be read" in refusal(own / "linear")


# How it is found by those who load models.


def test_it_is_registered(own: Path) -> None:
    one = REGISTERED["split_llama"]
    assert one.kind is SplitLlama and one.anatomy is None
    stated_keys = json.loads((own / "linear" / "config.json").read_text())
    assert one.recognises(stated_keys) and not one.recognises({"path8b": "x"}) and not one.recognises(NARROW)
    folder = own / "linear"
    assert list(one.parts(folder, stated_keys)) == [own / "narrow", own / "wide"]
    model = one.load(folder, stated_keys, torch.bfloat16, silent)
    assert isinstance(model, SplitLlama) and not model.training
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}
