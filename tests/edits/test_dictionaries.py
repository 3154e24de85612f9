"""Edits through a dictionary: what they compute, and dictionaries by folder and content."""

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.dictionaries import SparseAutoencoder, Transcoder, load_dictionary
from interp.edits import DictionaryReference, Reconstruct, SetFeature, coders, register_loader
from interp.errors import UserError
from tests.edits.samples import AT, CODER, EARLIER, N_LATENTS, N_POS, WIDTH, TinyCoder, context, noise

X = noise(N_POS, WIDTH, seed=99)
IN = context().held[EARLIER]


def test_one_latent_moves_along_its_decoder_row_and_the_rest_stays() -> None:
    for source, address, output in ((X, AT, None), (IN, EARLIER, AT)):
        z = CODER.encode(source)
        i = int((z > 0).all(0).nonzero()[0]) if (z > 0).all(0).any() else int(z.sum(0).argmax())
        row = CODER.out[i]
        for way, new in (("value", torch.full((N_POS,), 3.0)), ("delta", z[:, i] + 3), ("scale", z[:, i] * 3)):
            edit = SetFeature(address, CODER, i, output=output, **{way: 3.0})  # type: ignore[arg-type]
            right = X + (new - z[:, i])[:, None] * row
            assert torch.allclose(edit.apply(X, context()), right, rtol=0, atol=1e-13), way
        same = SetFeature(address, CODER, i, delta=0, output=output)
        assert torch.equal(same.apply(X, context()), X)  # the reconstruction error stays, exactly


def test_a_reconstruction_with_its_error_changes_nothing_and_lets_gradients_through() -> None:
    plain = Reconstruct(EARLIER, AT, CODER).apply(X, context())
    assert torch.equal(plain, CODER.decode(CODER.encode(IN), IN))
    x = X.clone().requires_grad_()
    kept = Reconstruct(AT, AT, CODER, keep_error=True).apply(x, context())
    assert torch.allclose(kept, X, rtol=0, atol=1e-13)
    (through,) = torch.autograd.grad(kept.sum(), x)
    again = X.clone().requires_grad_()
    (right,) = torch.autograd.grad(CODER.decode(CODER.encode(again), again).sum(), again)
    assert torch.allclose(through, right) and (right - 1).abs().max() > 0.1


class Bare:
    """The least that is a dictionary."""

    def encode(self, x: Tensor) -> Tensor:
        return x.relu()

    def decode(self, z: Tensor) -> Tensor:
        return 2 * z


def test_any_object_that_encodes_and_decodes_will_do() -> None:
    bare = Bare()
    assert torch.equal(Reconstruct(AT, AT, bare).apply(X, context()), 2 * X.relu())
    assert SetFeature(AT, bare, 1, value=0) == SetFeature(AT, bare, 1, value=0) != SetFeature(AT, Bare(), 1, value=0)
    assert len({SetFeature(AT, bare, 1, value=0), SetFeature(AT, bare, 1, value=0)}) == 1
    with pytest.raises(UserError, match="a folder or an object with encode and decode, not a float"):
        SetFeature(AT, 3.5, 1, value=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_is_given_its_own_dtype(dtype: torch.dtype) -> None:
    found = Reconstruct(AT, AT, TinyCoder(dtype)).apply(X, context())
    coder = TinyCoder(dtype)
    x = X.to(dtype)
    assert found.dtype == X.dtype and torch.equal(found, coder.decode(coder.encode(x), x).to(X))


def test_a_folder_is_read_once_in_the_dtype_of_the_point_and_known_by_content(tmp_path: Path) -> None:
    torch.manual_seed(3)
    coder = Transcoder(d_in=WIDTH, d_out=WIDTH, n_latents=N_LATENTS, k=3)
    for parameter in coder.parameters():
        parameter.data.normal_()
    coder.save(tmp_path / "one")
    edit = Reconstruct(EARLIER, AT, tmp_path / "one")
    loaded = load_dictionary(tmp_path / "one", dtype=torch.float64)
    assert torch.equal(edit.apply(X, context()), loaded(IN)) and edit.coder(X) is edit.coder(X)
    assert edit.dictionary == DictionaryReference.of(str(tmp_path / "one"))
    coder.save(tmp_path / "two")
    assert DictionaryReference.of(tmp_path / "two").sha256 == edit.dictionary.sha256
    coder.b_dec.data += 1
    coder.save(tmp_path / "two")
    changed = Reconstruct(EARLIER, AT, DictionaryReference(str(tmp_path / "two"), edit.dictionary.sha256))
    with pytest.raises(UserError, match="is not the one that this edit was made with"):
        changed.apply(X, context())
    with pytest.raises(UserError, match="no such folder"):
        SetFeature(AT, tmp_path / "none", 1, value=0)


def test_the_loader_of_ours_is_registered_where_the_package_is_installed() -> None:
    root = Path(__file__).parent.parent.parent
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"][coders.ENTRY_POINTS]
    (entry,) = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name, value, coders.ENTRY_POINTS) for name, value in declared.items()
    )
    assert entry.load() is load_dictionary


def test_loaders_are_tried_until_one_knows_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coders, "_LOADERS", dict(coders._LOADERS))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "kind").write_text("bare")
    reference = DictionaryReference.of(tmp_path / "bare")
    with pytest.raises(UserError, match="No dictionary in"):
        Reconstruct(AT, AT, reference).apply(X, context())

    def load_bare(folder: Path, *, device: Any, dtype: Any) -> Bare:
        if not (folder / "kind").exists():
            raise UserError("Not bare.")
        return Bare()

    register_loader("bare", load_bare)
    assert torch.equal(Reconstruct(AT, AT, reference).apply(X, context()), 2 * X.relu())


@pytest.mark.parametrize(
    ("amounts", "sentence"),
    [
        ({}, "one of value, delta and scale; got none"),
        ({"value": 1.0, "scale": 2.0}, "got value, scale"),
        ({"value": float("inf")}, "finite"),
    ],
)
def test_exactly_one_way_to_set_a_feature(amounts: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        SetFeature(AT, CODER, 1, **amounts)  # type: ignore[arg-type]


def test_a_dictionary_must_fit_its_points() -> None:
    like = torch.empty(0, dtype=torch.float64)
    edit = SetFeature(AT, CODER, N_LATENTS, value=0)
    edit.check_widths(None, None, like)
    with pytest.raises(UserError, match="Latent 9 does not exist: TinyCoder has 9"):
        edit.check_widths(WIDTH, WIDTH, like)
    with pytest.raises(UserError, match=r"TinyCoder gives 6 channels, but mlp_out\.1 is 7 wide"):
        Reconstruct(EARLIER, AT, CODER).check_widths(WIDTH, 7, like)
    with pytest.raises(UserError, match=r"does not encode mlp_in\.1, 5 wide"):
        Reconstruct(EARLIER, AT, CODER).check_widths(5, WIDTH, like)
    with pytest.raises(UserError, match="is an attention matrix"):
        SetFeature("attn_probs.1", CODER, 1, value=0)
    with pytest.raises(UserError, match="counted from 0; -1 is none"):
        SetFeature(AT, CODER, -1, value=0)


def test_a_sparse_autoencoder_of_ours_needs_no_input_to_decode() -> None:
    sae = SparseAutoencoder(d_in=WIDTH, n_latents=N_LATENTS, k=2)
    x = X.float()
    assert torch.equal(Reconstruct(AT, AT, sae).apply(x, context(dtype=torch.float32)), sae(x))
