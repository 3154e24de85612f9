"""Where a SplitLlama's two halves lie, and how only what it uses of them is read and written."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig

from interp.errors import UserError
from interp.models.checkpoint import first_line, read_config, resolve
from interp.models.loading import TOKENIZER_FILES

ADAPTER_FILE = "adapter.safetensors"
LAYERS_OF = {"path8b": "num_layers_8", "path70b": "num_layers_70"}
"""By the key that names a checkpoint, the key that says how many of its layers are used."""
WANTED = {str: "a path or a model's name in quotes", int: "a whole number", bool: "true or false"}
WEIGHT_FILES = ("model.safetensors", "*.safetensors", "pytorch_model.bin", "pytorch_model*.bin")
"""In the order in which transformers prefers them."""
BESIDE_TOKENIZER = (
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that a tokenizer reads where they are there, and that are none without its others."""


@dataclass
class SplitLlamaConfig:
    """What the `config.json` of a SplitLlama directory says; its other keys are not read.

    Raises `UserError` where the file is missing, or one of the keys is missing or of another type.
    """

    model_path: str | Path
    """The directory."""
    random_init: bool = False
    """Whether random weights are wanted, so that nothing need be said of them."""
    path8b: str = field(init=False)
    """The checkpoint of the embedding, the early layers and the tokenizer."""
    path70b: str = field(init=False)
    """The checkpoint of the late layers, the final norm and the head."""
    num_layers_8: int = field(init=False)
    """How many layers are used of the first, from its beginning."""
    num_layers_70: int = field(init=False)
    """How many layers are used of the second, up to its end."""
    vocab_size: int = field(init=False)
    """Of both checkpoints."""
    mlp: bool = field(init=False)
    """Whether the adapter is linear, ReLU, linear; else it is one linear map without bias."""

    def __post_init__(self) -> None:
        stated = read_config(self.folder)
        for key in (one for one in fields(self) if not one.init):
            if key.name not in stated:
                raise UserError(f"{self.file} has no key {key.name!r}, which a SplitLlama needs.")
            value = stated[key.name]
            if type(value) is not key.type:  # to isinstance, true is an int
                wanted = next(said for kind, said in WANTED.items() if kind is key.type)
                raise UserError(f"{self.file}: {key.name} must be {wanted}, not {json.dumps(value)}.")
            setattr(self, key.name, value)

    @property
    def folder(self) -> Path:
        """The directory."""
        return Path(self.model_path).expanduser()

    @property
    def file(self) -> Path:
        """Its `config.json`."""
        return self.folder / "config.json"


@dataclass(frozen=True)
class Half:
    """One of the two checkpoints, of which some layers are used."""

    key: str
    """What `config.json` names it by: `path8b` or `path70b`."""
    folder: Path
    config: LlamaConfig
    """Its own, but with as many layers as are used, and with a head that is a weight of its own."""
    start: int
    """The first layer that is used."""
    tied: bool
    """Whether its head is stored as its embedding."""

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls a weight whose layer counts from the first that is used."""
        if name == "lm_head.weight" and self.tied:
            return "model.embed_tokens.weight"
        above, layers, inside = name.partition("layers.")
        layer, _, rest = inside.partition(".")
        return f"{above}{layers}{int(layer) + self.start}.{rest}" if layers else name


def folder_of(config: SplitLlamaConfig, key: str, report: Callable[[str], None]) -> Path:
    """The folder that `key` names: relative to `config.json`, or else whatever `resolve` takes.

    Raises `UserError` where there is none.
    """
    stated = str(getattr(config, key))
    beside = (config.folder / Path(stated).expanduser()).resolve()
    if beside.is_dir():
        if not (beside / "config.json").is_file():
            raise UserError(f"{config.file}: {key} is {stated!r}, but the directory {beside} holds no config.json.")
        return beside
    missing = f"{config.file}: {key} is {stated!r}, but there is no directory {beside}"
    # What is no path of its own kind could be a model's name; a folder that lies elsewhere is none.
    if not beside.is_file() and (stated.startswith((".", "/", "~")) or Path(stated).exists()):
        raise UserError(f"{missing}.")
    try:
        return resolve(beside if beside.is_file() else stated, report).path
    except UserError as error:
        raise UserError(f"{missing}, and no model of that name is found either: {error}") from None


def halves_of(config: SplitLlamaConfig, report: Callable[[str], None]) -> tuple[Half, Half]:
    """The two checkpoints. Raises `UserError` where one is missing, is no Llama, or does not fit `config`."""
    first, last = _half(config, "path8b", report), _half(config, "path70b", report)
    if not first.config.vocab_size == last.config.vocab_size == config.vocab_size:
        raise UserError(
            f"{config.file}: vocab_size is {config.vocab_size}, but path8b ({first.folder}) has "
            f"{first.config.vocab_size} and path70b ({last.folder}) has {last.config.vocab_size}; all three must be "
            "equal."
        )
    return first, last


def _half(config: SplitLlamaConfig, key: str, report: Callable[[str], None]) -> Half:
    folder = folder_of(config, key, report)
    stated = read_config(folder)
    if stated.get("model_type") != "llama":
        raise UserError(
            f"{config.file}: {key} is {folder}, whose model_type is {stated.get('model_type')!r}; a SplitLlama is made "
            "of two Llama checkpoints."
        )
    if stated.get("quantization_config"):
        raise UserError(f"{config.file}: {key} is {folder}, whose weights are quantised; give one that is not.")
    try:
        llama = LlamaConfig.from_pretrained(folder)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, OSError, StrictDataclassError) as error:
        raise invalid(folder, error) from None
    asked, there = getattr(config, LAYERS_OF[key]), llama.num_hidden_layers
    if asked < 1:
        raise UserError(f"{config.file}: {LAYERS_OF[key]} is {asked}; at least 1 layer of each model is needed.")
    if asked > there:
        raise UserError(f"{config.file}: {LAYERS_OF[key]} is {asked}, but {key} ({folder}) has {there} layers.")
    tied = bool(llama.tie_word_embeddings)
    llama.num_hidden_layers, llama.tie_word_embeddings = asked, False
    return Half(key, folder, llama, there - asked if key == "path70b" else 0, tied)


def invalid(folder: Path, error: Exception) -> UserError:
    """That transformers does not take the folder's `config.json`, and why."""
    return UserError(f"{folder / 'config.json'} is no valid Llama config: {first_line(error)}.")


def read_weights(half: Half, needed: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The stored tensors for all names and shapes in `needed`, and no others; None where the folder holds no weights.

    Raises `UserError` where one is missing or of another shape, or a file cannot be read.
    """
    files = next((found for pattern in WEIGHT_FILES if (found := sorted(half.folder.glob(pattern)))), None)
    if files is None:
        return None
    stored: dict[str, Tensor] = {}
    names = {name: half.stored_name(name) for name in needed}
    for file in files:
        stored |= _read(file, set(names.values()))
    if missing := [name for name in names.values() if name not in stored]:
        raise UserError(
            f"{half.folder} ({half.key}) lacks {len(missing)} of the {len(names)} weights that are needed of it, "
            f"{missing[0]} first."
        )
    for name, tensor in needed.items():
        found, asked = list(stored[names[name]].shape), list(tensor.shape)
        if found != asked:
            raise UserError(
                f"{half.folder} ({half.key}) holds {names[name]} as {found}, but its config.json asks for {asked}."
            )
    return {name: stored[names[name]] for name in needed}


def read_adapter(config: SplitLlamaConfig, needed: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The adapter's state dict; None where the directory holds none.

    Raises `UserError` where names or shapes are others than those of `needed`, or the file cannot be read.
    """
    file = config.folder / ADAPTER_FILE
    if not file.is_file():
        return None
    stored = _read(file, None)
    found, asked = ({name: list(tensor.shape) for name, tensor in one.items()} for one in (stored, needed))
    if found != asked:
        said = [", ".join(f"{name} {shape}" for name, shape in sorted(one.items())) for one in (found, asked)]
        raise UserError(f"{file} holds {said[0] or 'nothing'}, but this adapter is {said[1]}.")
    return stored


def _read(file: Path, names: set[str] | None) -> dict[str, Tensor]:
    """The tensors of these names that the file holds; of all names for None."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys() if names is None or name in names}  # noqa: SIM118
        stored = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
        return {name: tensor for name, tensor in stored.items() if names is None or name in names}
    except (SafetensorError, UnpicklingError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}); copy or download it again.") from None


def write_checkpoint(folder: Path, config: LlamaConfig, weights: Mapping[str, Tensor]) -> None:
    """A new Llama checkpoint directory with these weights."""
    folder.mkdir()
    config.save_pretrained(folder)
    save_torch_state_dict({name: tensor.detach().cpu() for name, tensor in weights.items()}, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer's files, as many as there are."""
    for name in (*TOKENIZER_FILES, *BESIDE_TOKENIZER):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer's files lie there."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)
