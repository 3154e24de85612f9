"""How a checkpoint's files become a model and its tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from interp.errors import UserError
from interp.models.checkpoint import Checkpoint, architecture_in, first_line, has_weights, parts_of, read_config
from interp.models.parameters import seeded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)


def load_model_and_tokenizer(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    device_map: "str | dict[str, Any] | None" = None,
    offload_folder: str | Path | None = None,
    quantization: Any = None,
    *,
    random_init: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[nn.Module, "PreTrainedTokenizerBase | None"]:
    """The model in eval mode without gradients to its weights, and its tokenizer (none if the checkpoint has none).

    `device_map`, `offload_folder` and `quantization` (a `quantization_config`) are those of transformers. Without them
    built in `dtype` on the CPU, then moved: constants that a model rounds when it is built (Gemma's embedding scale)
    are then those of `dtype`; a model cast later keeps the rounding of the earlier dtype. Weights that no file has are
    drawn from a fixed seed, so that two loads give one model; `report` hears of it, unless `random_init` asks for it.

    Raises `UserError` if transformers does not know the model type, if the weights do not fit the config, or if a
    custom architecture is to be split or packed.
    """
    architecture = architecture_in(checkpoint)
    config = read_config(checkpoint.path)
    whole = "its weights are made here, whole and on one device: leave out device_map and quantization"
    placing = device_map is not None or quantization is not None
    if architecture is not None:
        if placing:
            raise UserError(f"{checkpoint.name} is of the architecture {architecture.name}, and {whole}.")
        with seeded():
            model = architecture.load(checkpoint.path, config, dtype, (lambda line: None) if random_init else report)
    elif random_init and not has_weights(checkpoint.path):
        if placing:
            raise UserError(f"{checkpoint.name} has no weights, and {whole}.")
        model = _random_model(checkpoint, dtype)
    else:
        return _pretrained(checkpoint, device, dtype, device_map, offload_folder, quantization)
    return model.eval().requires_grad_(False).to(device), _load_tokenizer(checkpoint)


def _pretrained(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    device_map: "str | dict[str, Any] | None",
    offload_folder: str | Path | None,
    quantization: Any,
) -> tuple[nn.Module, "PreTrainedTokenizerBase | None"]:
    """What transformers makes of the checkpoint."""
    from transformers import AutoModelForCausalLM

    packed = quantization is not None or _is_quantised(checkpoint)
    if device_map is None and packed:  # a packed model is not moved once it is loaded
        device_map = {"": device}
    placed = {} if device_map is None else {"device_map": device_map, "offload_folder": offload_folder}
    if quantization is not None:
        placed["quantization_config"] = quantization
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=dtype, output_loading_info=True, **placed
        )
    except _refusals() as error:
        raise UserError(f"Cannot load {checkpoint.name} from {checkpoint.path}: {first_line(error)}") from None
    model, loading = loaded
    missing = sorted(str(key) for key in loading.get("missing_keys", ()))
    if missing:
        raise UserError(
            f"{checkpoint.name} lacks {len(missing)} weights that its config asks for ({missing[0]} …); the checkpoint "
            f"in {checkpoint.path} is incomplete."
        )
    model.eval().requires_grad_(False)
    return model if placed else model.to(device), _load_tokenizer(checkpoint)


def _random_model(checkpoint: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """What transformers builds from the config alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with seeded():
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint.path), dtype=dtype)
    except _refusals() as error:
        raise UserError(f"Cannot build {checkpoint.name} from {checkpoint.path}: {first_line(error)}.") from None


def _refusals() -> tuple[type[Exception], ...]:
    """What transformers raises for a checkpoint that it cannot use."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return ValueError, KeyError, OSError, RuntimeError, ImportError, SafetensorError, StrictDataclassError


def _is_quantised(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's config says that its weights are packed; `UserError` if it says so in unknown words."""
    from transformers.quantizers.auto import AutoHfQuantizer

    stated = read_config(checkpoint.path).get("quantization_config")
    if not stated:
        return False
    # transformers itself warns, and loads packed numbers as if they were weights.
    if not AutoHfQuantizer.supports_quant_method(stated):
        method = stated.get("quant_method")
        raise UserError(
            f"Cannot load {checkpoint.name}: its config says that its weights are quantised by {method!r}, which this "
            "transformers does not know; use a checkpoint that is not quantised, or in another way."
        )
    return True


def _load_tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase | None":
    """The folder's own, else that of its first part."""
    folders = (checkpoint.path, *parts_of(checkpoint.path, architecture_in(checkpoint))[:1])
    return next((found for folder in folders if (found := load_tokenizer(folder, checkpoint.name)) is not None), None)


def load_tokenizer(folder: Path, name: str) -> "PreTrainedTokenizerBase | None":
    """The tokenizer whose files lie in `folder`; None where there are none.

    Raises `UserError` where they cannot be read.
    """
    from transformers import AutoTokenizer

    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UserError(f"Cannot load the tokenizer of {name}: {first_line(error)}") from None
