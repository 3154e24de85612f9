"""Where a dictionary lies on disk: `config.json` and `weights.safetensors`, validated when read.

A folder of dictionaries has one sub-folder per input point, with the finished one under `final`:
`{input point}/final/config.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interp.dictionaries.base import Dictionary
from interp.dictionaries.config import DictionaryConfig, Kind
from interp.dictionaries.sparse_autoencoder import SparseAutoencoder
from interp.dictionaries.transcoder import Transcoder
from interp.errors import UserError
from interp.files import atomic_dir
from interp.points import Address, ModelInfo

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"
FINAL = "final"
KINDS: dict[Kind, type[Dictionary]] = {"sae": SparseAutoencoder, "transcoder": Transcoder}


def save_dictionary(dictionary: Dictionary, folder: str | Path) -> None:
    """Write `dictionary` as the folder `folder`, replacing an earlier one; whole or not at all."""
    with atomic_dir(folder) as temporary:
        write_dictionary(dictionary, temporary)


def write_dictionary(dictionary: Dictionary, folder: Path) -> None:
    """Write the two files into `folder`, which exists; for callers that add files of their own beside them."""
    dtype = getattr(torch, dictionary.config.dtype)
    weights = {name: tensor.detach().to(dtype).cpu().contiguous() for name, tensor in _weights(dictionary).items()}
    if "threshold" in weights:
        weights["threshold"] = _weights(dictionary)["threshold"].detach().float().cpu().contiguous()
    save_file(weights, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(asdict(dictionary.config), indent=2) + "\n", encoding="utf-8")


def read_config(folder: str | Path) -> DictionaryConfig:
    """The config of the dictionary in `folder`. Raises `UserError` where there is none or it is not valid."""
    path = Path(folder) / CONFIG_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"No dictionary in {folder}: it has no {CONFIG_FILE}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {error}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a dictionary config: a JSON object was expected.")
    return DictionaryConfig.from_json(data, str(path))


def load_dictionary(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    kind: Kind | None = None,
) -> Dictionary:
    """The dictionary in `folder`, on `device`, in `dtype` (default: as saved). `kind`, if given, must be its kind.

    Raises `UserError` where a file is missing, damaged or does not fit the config.
    """
    config = read_config(folder)
    if kind is not None and config.kind != kind:
        raise UserError(f"{folder} holds a dictionary of kind {config.kind}, not {kind}.")
    with torch.device("meta"):
        dictionary = KINDS[config.kind](config)
    weights = _read_weights(Path(folder) / WEIGHTS_FILE, _weights(dictionary))
    for name, tensor in weights.items():
        target = torch.float32 if name == "threshold" else dtype or tensor.dtype
        owner = dictionary.activation if name == "threshold" else dictionary
        parameter = torch.nn.Parameter(tensor.to(device=device, dtype=target), requires_grad=True)
        setattr(owner, name, parameter)
    return dictionary.eval().requires_grad_(False)


def load_dictionaries(
    folder: str | Path,
    model: ModelInfo | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[int, Transcoder]:
    """The finished transcoders under `folder`, by the layer of their input point.

    With `model`, raises `UserError` where one was trained on another model.
    """
    folders = sorted(path.parent for path in Path(folder).glob(f"*/{FINAL}/{CONFIG_FILE}"))
    if not folders:
        raise UserError(
            f"No dictionaries in {folder}: expected {{input point}}/{FINAL}/{CONFIG_FILE}, "
            "as interp-train-transcoders writes it."
        )
    loaded: dict[int, Transcoder] = {}
    for path in folders:
        config = read_config(path)
        if model is not None:
            check_model(config, model, str(path))
        layer = Address.parse(config.input_points[0]).layer if config.input_points else None
        if layer is None:
            raise UserError(
                f"{path / CONFIG_FILE} names no layer in input_points, so it cannot be placed in the model."
            )
        if layer in loaded:
            raise UserError(f"{folder} holds two dictionaries that read layer {layer}; keep one of them.")
        loaded[layer] = cast(Transcoder, load_dictionary(path, device=device, dtype=dtype, kind="transcoder"))
    return dict(sorted(loaded.items()))


def check_model(config: DictionaryConfig, model: ModelInfo, where: str) -> None:
    """Raise `UserError` unless the dictionary of `config`, found at `where`, can belong to `model`."""
    trained_on = config.model
    if trained_on is not None and trained_on.fingerprint and trained_on.fingerprint != model.fingerprint:
        raise UserError(
            f"{where} was trained on another model ({trained_on.id}, fingerprint {trained_on.fingerprint}) "
            f"than {model.name} (fingerprint {model.fingerprint}); give the folder that belongs to this one."
        )
    for point in config.input_points + config.output_points:
        layer = Address.parse(point).layer
        if layer is not None and layer >= model.n_layers:
            raise UserError(f"{where} belongs to {point}, but {model.name} has layers 0 to {model.n_layers - 1}.")


def _weights(dictionary: Dictionary) -> dict[str, Tensor]:
    """Parameters by their names in the file, which knows no modules."""
    return {name.removeprefix("activation."): tensor for name, tensor in dictionary.named_parameters()}


def _read_weights(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            missing, unknown = sorted(set(expected) - names), sorted(names - set(expected))
            if missing or unknown:
                said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)} too"] * bool(
                    unknown
                )
                raise UserError(f"{path} does not fit its config: it {' and '.join(said)}.")
            weights = {name: file.get_tensor(name) for name in expected}
    except FileNotFoundError:
        raise UserError(f"No weights beside the config: {path} does not exist.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"Cannot read {path}, which may be truncated: {error}.") from None
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{path}: {name} has shape {list(tensor.shape)}, its config says {list(expected[name].shape)}."
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{path}: {name} holds values that are no finite floating-point numbers.")
    return weights
