"""Edits travel as JSON and come back equal; anything else is refused with what is known."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given

from interp.dictionaries import SparseAutoencoder
from interp.edits import Add, Call, DictionaryReference, Edit, Reconstruct, SetFeature, Tokens, from_json, to_json
from interp.errors import UserError
from tests.edits.samples import AT, CODER, PLAIN, Sample, samples

REFERENCE = DictionaryReference("somewhere/sae", "0123456789abcdef")
THROUGH = [
    SetFeature("resid_post.3", REFERENCE, 7, value=0.0, positions="last_prompt"),
    SetFeature("mlp_in.3", REFERENCE, 7, delta=-0.0, output="mlp_out.3"),
    SetFeature("mlp_in.3", REFERENCE, 7, scale=1.0, output="mlp_out.3", positions=("3:", Tokens((5, 1)))),
    Reconstruct("mlp_in.3", "mlp_out.3", REFERENCE, keep_error=True),
    Reconstruct("resid_post.3", "resid_post.3", REFERENCE, positions="generated"),
]


@given(samples(PLAIN))
def test_edits_come_back_equal(sample: Sample) -> None:
    edit = sample.make()
    (again,) = from_json(to_json([edit]))
    assert again == edit and hash(again) == hash(edit) and repr(again) == repr(edit)
    assert again.structure == edit.structure and to_json([again]) == to_json([edit])


def test_several_come_back_in_order_with_their_dictionaries_by_reference() -> None:
    edits: list[Edit] = [*THROUGH, Add(AT, torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16))]
    text = to_json(edits)
    assert from_json(text) == edits and "\n" not in text
    first = json.loads(text)["edits"][0]
    assert first == {
        "edit": "SetFeature",
        "address": "resid_post.3",
        "dictionary": {"folder": "somewhere/sae", "sha256": "0123456789abcdef"},
        "latent": 7,
        "value": 0.0,
        "positions": ["last_prompt"],
    }


def test_an_object_with_a_folder_travels_as_that_folder(tmp_path: Any) -> None:
    sae = SparseAutoencoder(d_in=4, n_latents=6, k=2)
    sae.save(tmp_path / "sae")
    with pytest.raises(UserError, match="lies in memory alone; save it"):
        to_json([SetFeature(AT, sae, 1, value=0.0)])
    sae.folder = tmp_path / "sae"  # type: ignore[assignment]
    (again,) = from_json(to_json([SetFeature(AT, sae, 1, value=0.0)]))
    assert again == SetFeature(AT, tmp_path / "sae", 1, value=0.0)


class Mine(Edit):
    """An edit of a user's own."""


@pytest.mark.parametrize("edit", [Call(AT, torch.relu), Mine(AT)])
def test_python_does_not_travel(edit: Edit) -> None:
    with pytest.raises(UserError, match="calls Python and cannot be JSON; use Add, Scale"):
        to_json([edit])
    assert not edit.portable and CODER is not None


ADD = {"edit": "Add", "address": AT, "vector": json.loads(to_json([Add(AT, torch.ones(2))]))["edits"][0]["vector"]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "are no JSON"),
        ("[]", '"version": 1'),
        ('{"version": 2, "edits": []}', "version 2, and this interp reads version 1"),
        ([3], "an object whose"),
        ([{"edit": "Addd", "address": AT}], "No edit is called 'Addd'; known: Add, Scale, Replace"),
        ([{"edit": "Call", "address": AT}], "No edit is called 'Call'"),
        ([ADD | {"factor": 2}], "Add has no field factor; known: address, vector, scale, positions"),
        ([{"edit": "Add", "address": AT}], "Add lacks vector; known fields: address, vector"),
        ([ADD | {"address": 3}], "address of Add is a text"),
        ([ADD | {"address": "mlp.1"}], "No point is called 'mlp'"),
        ([ADD | {"vector": [1.0]}], "A tensor in JSON"),
        ([ADD | {"scale": "2"}], "scale is a number, not '2'"),
        ([ADD | {"positions": [-2]}], "Position -2"),
        ([ADD | {"positions": {"a": 1}}], "Positions are null"),
        ([{"edit": "SetFeature", "address": AT, "dictionary": "x", "latent": 1, "value": 0}], "A dictionary in JSON"),
        ([json.loads(to_json(THROUGH[:1]))["edits"][0] | {"delta": 1}], "one of value, delta and scale"),
        ([json.loads(to_json(THROUGH[3:4]))["edits"][0] | {"keep_error": 1}], "True or False"),
    ],
)
@pytest.mark.usefixtures("unchecked_signatures")
def test_other_json_is_refused_in_a_sentence(text: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        from_json(text if isinstance(text, str) else json.dumps({"version": 1, "edits": text}))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
