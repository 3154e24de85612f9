"""Edits: what to change at a point, as data that any engine applies with the same arithmetic."""

from interp.edits.arithmetic import Ablate, Add, Scale
from interp.edits.as_json import from_json, to_json
from interp.edits.base import Context, Edit
from interp.edits.call import Call
from interp.edits.coders import DictionaryReference, register_loader
from interp.edits.directions import Cap, Project, Swap
from interp.edits.features import Reconstruct, SetFeature
from interp.edits.rows import Freeze, Patch, Replace
from interp.edits.values import Values
from interp.points import Positions, Tokens

__all__ = [
    "Ablate",
    "Add",
    "Call",
    "Cap",
    "Context",
    "DictionaryReference",
    "Edit",
    "Freeze",
    "Patch",
    "Positions",
    "Project",
    "Reconstruct",
    "Replace",
    "Scale",
    "SetFeature",
    "Swap",
    "Tokens",
    "Values",
    "from_json",
    "register_loader",
    "to_json",
]
