"""What is saved comes back bit for bit; what is damaged, foreign or another model's is refused in one sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from interp.dictionaries import (
    ActivationConfig,
    Dictionary,
    DictionaryConfig,
    ModelReference,
    SparseAutoencoder,
    Transcoder,
    load_dictionaries,
    load_dictionary,
)
from interp.errors import UserError
from interp.points import ModelInfo

MODEL = ModelInfo(
    name="tiny", family="llama", fingerprint="abc", n_layers=12, d_model=5, n_heads=1, n_kv_heads=1, d_head=5, d_mlp=9,
    d_vocab=50, n_ctx=64, bos_token_id=0, dtype="float32", device="cpu", parallel=False,
)  # fmt: skip


def transcoder(layer: int = 0, fingerprint: str = "abc") -> Transcoder:
    made = Transcoder(d_in=5, d_out=7, n_latents=11, k=3)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    made.config.input_points, made.config.output_points = [f"mlp_in.{layer}"], [f"mlp_out.{layer}"]
    made.config.model = ModelReference(id="tiny", fingerprint=fingerprint)
    made.config.excluded_token_ids = [0]
    made.config.metrics = {"fvu": 0.25}
    return made


def jumprelu() -> SparseAutoencoder:
    made = SparseAutoencoder(d_in=5, n_latents=11, activation="jumprelu")
    for parameter in made.parameters():
        torch.nn.init.uniform_(parameter)
    return made


@pytest.mark.parametrize("make", [transcoder, jumprelu])
def test_round_trip_is_exact(make: Callable[[], Dictionary], tmp_path: Path) -> None:
    original = make()
    original.save(tmp_path / "d")
    loaded = type(original).load(tmp_path / "d")
    assert loaded.config == original.config
    assert {n for n, _ in loaded.named_parameters()} == {n for n, _ in original.named_parameters()}
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name
    x = torch.randn(3, 5)
    assert torch.equal(loaded(x), original(x))


def test_thresholds_stay_float32_in_any_dtype(tmp_path: Path) -> None:
    original = jumprelu()
    original.config.dtype = "bfloat16"
    original.save(tmp_path / "d")
    loaded = SparseAutoencoder.load(tmp_path / "d")
    assert loaded.W_enc.dtype == torch.bfloat16
    threshold = loaded.get_parameter("activation.threshold")
    assert threshold.dtype == torch.float32
    assert torch.equal(threshold, original.get_parameter("activation.threshold"))
    half = SparseAutoencoder.load(tmp_path / "d", dtype=torch.float16)
    assert half.W_enc.dtype == torch.float16
    assert torch.equal(half.get_parameter("activation.threshold"), threshold)


def test_files_on_disk_are_as_documented(tmp_path: Path) -> None:
    transcoder().save(tmp_path / "d")
    weights = load_file(tmp_path / "d" / "weights.safetensors")
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == {
        "W_enc": [11, 5],
        "b_enc": [11],
        "W_dec": [11, 7],
        "b_dec": [7],
        "W_skip": [7, 5],
    }
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["format_version"] == 1
    assert config["activation"] == {"name": "topk", "k": 3}
    assert config["model"] == {"id": "tiny", "revision": None, "fingerprint": "abc"}


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "weights.safetensors"
    weights = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path)


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda d: (d / "config.json").unlink(), "has no config.json"),
    (lambda d: (d / "config.json").write_text("{"), "Cannot read"),
    (lambda d: (d / "config.json").write_text("[]"), "JSON object"),
    (lambda d: edit_config(d, format_version=2), "newer than 1"),
    (lambda d: edit_config(d, format_version=...), "no format_version"),
    (lambda d: edit_config(d, colour="red"), "does not know: colour"),
    (lambda d: edit_config(d, d_in=...), "lacks d_in"),
    (lambda d: edit_config(d, d_in=0), "positive integer"),
    (lambda d: edit_config(d, kind="probe"), "kind"),
    (lambda d: edit_config(d, kind="sae", d_out=5, skip=False), "of kind sae, not transcoder"),
    (lambda d: edit_config(d, activation={"name": "topk"}), "needs k"),
    (lambda d: edit_config(d, activation={"name": "topk", "q": 3}), "not a valid dictionary config"),
    (lambda d: edit_config(d, subtract_b_dec=True), "never subtracts"),
    (lambda d: (d / "weights.safetensors").unlink(), "does not exist"),
    (lambda d: (d / "weights.safetensors").write_bytes(b"\x00" * 40), "truncated"),
    (lambda d: edit_weights(d, W_skip=None), "lacks W_skip"),
    (lambda d: edit_weights(d, W_gate=torch.zeros(2)), "has W_gate too"),
    (lambda d: edit_weights(d, W_dec=torch.zeros(7, 11)), r"W_dec has shape \[7, 11\], its config says \[11, 7\]"),
    (lambda d: edit_weights(d, b_dec=torch.full((7,), float("nan"))), "finite"),
    (lambda d: edit_weights(d, b_dec=torch.zeros(7, dtype=torch.int32)), "floating-point"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE, ids=[said for _, said in DAMAGE])
def test_damage_is_named(
    damage: Callable[[Path], object], said: str, tmp_path: Path, unchecked_signatures: None
) -> None:
    transcoder().save(tmp_path / "d")
    damage(tmp_path / "d")
    with pytest.raises(UserError, match=said) as caught:
        Transcoder.load(tmp_path / "d")
    assert "\n" not in str(caught.value)


def test_a_failed_save_leaves_the_old_one(tmp_path: Path) -> None:
    first = transcoder()
    first.save(tmp_path / "d")
    broken = transcoder()
    broken.config.dtype = "nonsense"
    with pytest.raises(AttributeError):
        broken.save(tmp_path / "d")
    assert torch.equal(Transcoder.load(tmp_path / "d").W_enc, first.W_enc)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_folder_of_dictionaries_is_sorted_by_layer(tmp_path: Path) -> None:
    for layer in (10, 2, 0):
        transcoder(layer).save(tmp_path / f"mlp_in.{layer}" / "final")
    transcoder(3).save(tmp_path / "mlp_in.3" / "step_100")
    assert list(load_dictionaries(tmp_path, MODEL)) == [0, 2, 10]


def test_dictionaries_of_another_model_are_refused(tmp_path: Path) -> None:
    transcoder(0, fingerprint="def").save(tmp_path / "mlp_in.0" / "final")
    with pytest.raises(UserError, match="trained on another model"):
        load_dictionaries(tmp_path, MODEL)
    assert list(load_dictionaries(tmp_path)) == [0]
    transcoder(12, fingerprint="").save(tmp_path / "mlp_in.0" / "final")
    with pytest.raises(UserError, match="layers 0 to 11"):
        load_dictionaries(tmp_path, MODEL)


def test_an_empty_folder_and_a_doubled_layer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No dictionaries in"):
        load_dictionaries(tmp_path)
    transcoder(4).save(tmp_path / "mlp_in.4" / "final")
    transcoder(4).save(tmp_path / "copy" / "final")
    with pytest.raises(UserError, match="two dictionaries that read layer 4"):
        load_dictionaries(tmp_path)


def test_a_dictionary_that_names_no_point_cannot_be_placed(tmp_path: Path) -> None:
    Transcoder(d_in=5, d_out=7, n_latents=11, k=3).save(tmp_path / "x" / "final")
    with pytest.raises(UserError, match="names no layer"):
        load_dictionaries(tmp_path)


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    jumprelu().save(tmp_path / "d")
    assert isinstance(load_dictionary(tmp_path / "d"), SparseAutoencoder)
    with pytest.raises(UserError, match="of kind sae, not transcoder"):
        Transcoder.load(tmp_path / "d")


def test_a_config_cannot_contradict_itself() -> None:
    good = DictionaryConfig("sae", 4, 4, 8, ActivationConfig("relu"))
    with pytest.raises(UserError, match="reconstructs its input"):
        replace(good, d_out=5)
    with pytest.raises(UserError, match="no skip connection"):
        replace(good, skip=True)
