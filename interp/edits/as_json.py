"""Edits as JSON text and back: `{"version": 1, "edits": [{"edit": "Add", "address": ..., ...}, ...]}`."""

import inspect
import json
from collections.abc import Sequence
from typing import Any

from interp.edits.arithmetic import Ablate, Add, Scale
from interp.edits.base import Edit
from interp.edits.coders import Coder, DictionaryReference
from interp.edits.directions import Cap, Project, Swap
from interp.edits.features import Reconstruct, SetFeature
from interp.edits.rows import Freeze, Patch, Replace
from interp.edits.values import Values
from interp.errors import UserError
from interp.points import ALL, Address, Positions

VERSION = 1
KINDS: dict[str, type[Edit]] = {
    kind.__name__: kind
    for kind in (Add, Scale, Replace, Project, Cap, Ablate, Patch, SetFeature, Reconstruct, Freeze, Swap)
}


def to_json(edits: Sequence[Edit]) -> str:
    """One line of JSON that `from_json` reads back as equal edits. Raises `UserError` for what cannot be data."""
    return json.dumps({"version": VERSION, "edits": [_encoded(edit) for edit in edits]})


def from_json(text: str) -> list[Edit]:
    """The edits that `to_json` wrote; raises `UserError` for anything else, naming what is known."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(f"These edits are no JSON: {error}.") from None
    if not isinstance(data, dict) or set(data) != {"version", "edits"} or not isinstance(data["edits"], list):
        raise UserError('Edits in JSON are {"version": 1, "edits": [...]}.')
    if data["version"] != VERSION:
        raise UserError(f"These edits have version {data['version']!r}, and this interp reads version {VERSION}.")
    return [_decoded(one) for one in data["edits"]]


def _encoded(edit: Edit) -> dict[str, Any]:
    name = type(edit).__name__
    if KINDS.get(name) is not type(edit):
        raise UserError(f"{name} calls Python and cannot be JSON; use {', '.join(KINDS)}.")
    given = edit.arguments()
    parameters = inspect.signature(type(edit)).parameters
    kept = {key: value for key, value in given.items() if not _is_default(value, parameters[key])}
    return {"edit": name} | {key: _plain(value) for key, value in kept.items()}


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    if parameter.name == "positions":
        return value == ALL
    return (
        parameter.default is not inspect.Parameter.empty
        and type(value) is type(parameter.default)
        and (value is parameter.default or value == parameter.default)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (Values, Positions, DictionaryReference)):
        return value.to_json()
    if isinstance(value, Address):
        return str(value)
    if isinstance(value, Coder):
        if value.folder is None:
            raise UserError(f"This {value} lies in memory alone; save it and make the edit with its folder.")
        return DictionaryReference.of(value.folder).to_json()
    return value


def _decoded(data: Any) -> Edit:
    if not isinstance(data, dict) or not isinstance(data.get("edit"), str):
        raise UserError(f'An edit in JSON is an object whose "edit" is one of {", ".join(KINDS)}.')
    kind = KINDS.get(data["edit"])
    if kind is None:
        raise UserError(f"No edit is called {data['edit']!r}; known: {', '.join(KINDS)}.")
    known = inspect.signature(kind).parameters
    given = {key: value for key, value in data.items() if key != "edit"}
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"{kind.__name__} has no field {', '.join(unknown)}; known: {', '.join(known)}.")
    needed = [name for name, parameter in known.items() if parameter.default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in given]:
        raise UserError(f"{kind.__name__} lacks {', '.join(missing)}; known fields: {', '.join(known)}.")
    for name in {"address", "input", "output"} & set(given):
        if not isinstance(given[name], str):
            raise UserError(f"The {name} of {kind.__name__} is a text such as 'resid_post.3', not {given[name]!r}.")
    return kind(**{name: _value(name, value) for name, value in given.items()})


def _value(name: str, value: Any) -> Any:
    if name == "positions":
        return Positions.from_json(value)
    if name == "dictionary":
        return DictionaryReference.from_json(value)
    return Values.from_json(value) if isinstance(value, (dict, list)) else value
