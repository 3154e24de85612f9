"""An adapter between two groups of blocks as a linear map, on one prompt.

Held fixed are what each activation multiplies its argument by, f(u) / u (a ReLU's mask), and each norm's denominator.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.models.anatomy import Bridge, Network, Piece, Refusal
from interp.models.linear import Linear
from interp.models.norms import Norm
from interp.models.transforms import Scale
from interp.models.weights import norm_weights


@dataclass(frozen=True, slots=True, eq=False)
class FrozenBridge:
    """The pieces of an adapter, each with what is held fixed there."""

    steps: tuple[tuple[Piece, Tensor | None], ...]
    """An activation's factors, [..., width], or a norm's denominators, [..., 1]."""

    def forward(self, x: Tensor, positions: list[int]) -> Tensor:
        """What x, [..., d_in], adds to what the adapter gives, [..., d_out], its biases left out.

        What is held fixed is averaged over the positions.
        """
        for piece, fixed in self.steps:
            if isinstance(piece, Linear):
                x = x @ piece.weight.detach().to(x).T
            elif isinstance(piece, Scale):
                x = x * piece.factor
            else:
                assert fixed is not None
                mean = fixed[positions].mean(0)
                x = norm_weights(piece, like=x).forward(x, mean) if isinstance(piece, Norm) else x * mean
        return x

    def adjoint(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradient at what the adapter gives, [..., d_out], that at what it reads, [..., d_in].

        And what its biases add to the target, [...].
        """
        bias = g.new_zeros(g.shape[:-1])
        for piece, fixed in reversed(self.steps):
            if isinstance(piece, Linear):
                bias = bias if piece.bias is None else bias + g @ piece.bias.detach().to(g)
                g = g @ piece.weight.detach().to(g)
            elif isinstance(piece, Norm):
                norm = norm_weights(piece, like=g)
                assert fixed is not None
                bias = bias if norm.bias is None else bias + g @ norm.bias
                g = norm.adjoint(g, fixed)
            elif isinstance(piece, Scale):
                g = g * piece.factor
            else:
                assert fixed is not None
                g = g * fixed
        return g, bias


def not_linear(bridge: Bridge) -> Refusal | None:
    """Why an adapter is no linear map once its activations and norms are fixed; None where it is one."""
    if isinstance(bridge.pieces, Refusal):
        return bridge.pieces
    for piece in bridge.pieces:
        if isinstance(piece, Network):
            return Refusal(f"{piece.path} is a network of its own, not a chain of maps, norms and activations")
        if isinstance(piece, Linear) and piece.refusal:
            return Refusal(piece.refusal)
        if not isinstance(piece, (Linear, Norm, Scale)) and bool(piece(torch.zeros(1)) != 0):
            return Refusal("an activation in the adapter is not 0 at 0, so no factor of its argument gives it")
    return None


def frozen(bridge: Bridge, x: Tensor) -> FrozenBridge:
    """The adapter with everything held fixed that it does to x, [..., d_in], of one prompt."""
    assert not isinstance(bridge.pieces, Refusal)
    steps: list[tuple[Piece, Tensor | None]] = []
    with torch.no_grad():
        for piece in bridge.pieces:
            x, fixed = _applied(piece, x)
            steps.append((piece, fixed))
    return FrozenBridge(tuple(steps))


def _applied(piece: Piece, x: Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(piece, Linear):
        y = x @ piece.weight.to(x).T
        return (y if piece.bias is None else y + piece.bias.to(x)), None
    if isinstance(piece, Norm):
        norm, scale = norm_weights(piece, like=x), piece.scale(x)
        y = norm.forward(x, scale)
        return (y if norm.bias is None else y + norm.bias), scale
    if isinstance(piece, Scale):
        return piece.read(x), None
    assert not isinstance(piece, Network)
    function: Callable[[Tensor], Tensor] = piece
    y = function(x)
    return y, torch.where(x == 0, torch.zeros_like(x), y / x)
