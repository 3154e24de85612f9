"""Which norm a module computes: found by arithmetic on what it received and returned, never by its class name.

RMSNorm: y = x / sqrt(mean(x^2) + eps) · gain. LayerNorm: y = (x - mean(x)) / sqrt(var(x) + eps) · gain + bias.
The effective gain is the weight on most families and 1 + weight on Gemma's; both are tried and one must fit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from interp.models.parameters import own


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A proven norm: `(x - mean) / scale · gain + bias`, the mean 0 for RMSNorm."""

    path: str
    module: nn.Module
    centred: bool
    eps: float
    gain_offset: float
    """Added to the weight to give the effective gain: 0, or 1 on Gemma."""

    @property
    def gain(self) -> Tensor:
        """Effective gain, [d] or [heads, d], ones without a weight.

        In float32 at least: in bfloat16, 1 + weight would be rounded.
        """
        weight = own(self.module, "weight")
        return torch.ones(()) if weight is None else weight.to(_wide(weight)) + self.gain_offset

    @property
    def bias(self) -> Tensor | None:
        """[d], or None."""
        return own(self.module, "bias")

    def scale(self, x: Tensor) -> Tensor:
        """The denominator, epsilon included: [..., 1]."""
        x = x.to(_wide(x))
        if self.centred:
            return (x.var(-1, unbiased=False, keepdim=True) + self.eps).sqrt()
        return (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def normalized(self, x: Tensor) -> Tensor:
        """x / scale, centred first by LayerNorm: [..., d]."""
        wide = x.to(_wide(x))
        return (wide - wide.mean(-1, keepdim=True) if self.centred else wide) / self.scale(wide)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def classify(path: str, module: nn.Module, x: Tensor, y: Tensor) -> Norm | None:
    """The Norm that turns `x` into `y` ([..., d] both), or None if none of the known formulas does.

    Of the formulas that fit within rounding the closest is taken: in bfloat16 a wrong epsilon or gain may fit too.
    """
    if x.shape != y.shape or not x.is_floating_point() or any(True for _ in module.children()):
        return None
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.get("weight"), parameters.get("bias")
    shapes = (x.shape[-1:], x.shape[-2:])  # one gain per channel, or per head and channel
    if any(p.shape not in shapes for p in parameters.values()) or set(parameters) - {"weight", "bias"}:
        return None
    tolerance = 64 * torch.finfo(x.dtype).eps * y.abs().amax().double()
    closest: tuple[float, Norm] | None = None
    for eps in _epsilons(module):
        for centred in (False, True):
            for offset in (0.0, 1.0) if weight is not None else (0.0,):
                norm = Norm(path, module, centred, eps, offset)
                fitted = norm.normalized(x).double() * norm.gain.double()
                if bias is not None:
                    fitted = fitted + norm.bias.double()  # type: ignore[union-attr]
                difference = float((fitted - y.double()).detach().square().mean())
                fits = (fitted - y.double()).abs().amax() <= tolerance
                if fits and (closest is None or difference < closest[0]):
                    closest = (difference, norm)
    return None if closest is None else closest[1]


def _epsilons(module: nn.Module) -> list[float]:
    stated = [value for name, value in vars(module).items() if "eps" in name.lower() and isinstance(value, float)]
    return stated or [1e-6, 1e-5, 1e-12]
