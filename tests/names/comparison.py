"""Another tool's tensors against the points that its names translate to: each agrees or is refused with a reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from interp.engines.base import Request
from interp.names import Answer, NameRefused, read
from tests.families.loaded import engine
from tests.names.conftest import TOKENS

UNITS = 64
"""How many units of fp32 rounding at the point's largest entry their fp32 run and our fp64 one may differ by."""


@dataclass
class Comparison:
    """One tool's names on one model."""

    translated: dict[str, Answer] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def share(self, names: list[str]) -> float:
        """Of `names`, how many are translated."""
        return sum(name in self.translated for name in names) / len(names)


def compare(tool: str, family: str, tensors: Mapping[str, Tensor]) -> Comparison:
    """Translate every name of `tensors` on the tiny model of `family` and compare what it names there."""
    model, result = engine(family), Comparison()
    for name in tensors:
        try:
            result.translated[name] = read(name, tool, model.layout)
        except NameRefused as refusal:
            result.refused[name] = str(refusal)
    points = sorted({str(answer.address) for answer in result.translated.values()})
    captured = model.run([Request(TOKENS, capture=points)])[0].capture
    for name, answer in result.translated.items():
        if difference := _difference(tensors[name], captured[answer.address], answer):
            result.wrong.append(f"{name} is not {answer.address}: {difference}")
    return result


def _difference(theirs: Tensor, ours: Tensor, answer: Answer) -> str:
    """Empty where they agree; a shape that differs must have been announced."""
    if theirs.shape[0] == 1 and theirs.shape != ours.shape:
        theirs = theirs[0]
    if theirs.shape != ours.shape:
        if not answer.note:
            return f"its shape {list(theirs.shape)} instead of {list(ours.shape)} is not announced"
        if "repeated for every head" in answer.note:
            ours = ours.unsqueeze(-2).expand(theirs.shape)
        elif "heads come before positions" in answer.note:
            theirs = theirs.transpose(0, 1)
        theirs = theirs.reshape(ours.shape)
    kept = torch.ones_like(ours, dtype=torch.bool)
    if answer.address.name == "attn_scores":
        kept = ours > -1e30
        if not (theirs[~kept] < -1e4).all():
            return "its masked entries are not large and negative"
    scale = ours[kept].abs().amax() * torch.finfo(torch.float32).eps
    units = ((theirs - ours)[kept].abs().amax() / scale).item()
    return "" if units <= UNITS else f"off by {units:.3g} units of rounding"
