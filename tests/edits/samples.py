"""Edits of every kind at a point 6 channels wide, for properties that hold for all of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from interp.edits import (
    Ablate,
    Add,
    Cap,
    Context,
    Edit,
    Freeze,
    Patch,
    Project,
    Reconstruct,
    Replace,
    Scale,
    SetFeature,
    Swap,
    Tokens,
)
from interp.points import Address

WIDTH, N_POS, N_LATENTS = 6, 5, 9
AT, EARLIER = "mlp_out.1", Address("mlp_in", 1)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class TinyCoder(nn.Module):
    """A dictionary of nobody's: ReLU latents, a decoder, and a linear path past both."""

    def __init__(self, dtype: torch.dtype = torch.float64, d_out: int = WIDTH) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        draw = lambda *shape: nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))  # noqa: E731
        self.into, self.out, self.skip = draw(WIDTH, N_LATENTS), draw(N_LATENTS, d_out), draw(WIDTH, d_out)

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.into).relu()

    def decode(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.out + x @ self.skip


CODER = TinyCoder()


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def context(selected: list[bool] | None = None, dtype: torch.dtype = torch.float64) -> Context:
    chosen = None if selected is None else torch.tensor(selected)
    held = {EARLIER: noise(N_POS, WIDTH, seed=21, dtype=dtype)}
    return Context(torch.arange(N_POS), chosen, held, noise(WIDTH, seed=22, dtype=dtype))


class Sample(NamedTuple):
    """An edit to be made: signatures are checked at random places, which must not happen while values are drawn."""

    kind: str
    dtype: torch.dtype
    positions: Any
    seed: int
    amount: float

    def make(self) -> Edit:
        """The edit."""
        kind, dtype, positions, seed, amount = self
        v, w = noise(WIDTH, seed=seed, dtype=dtype), noise(WIDTH, seed=seed + 1, dtype=dtype)
        rows = noise(N_POS, WIDTH, seed=seed, dtype=dtype)
        match kind:
            case "Add":
                return Add(AT, v, amount, positions=positions)
            case "Scale":
                return Scale(AT, amount, positions=positions)
            case "Replace":
                return Replace(AT, rows if seed % 2 else v, positions=positions)
            case "Freeze":
                return Freeze(AT, rows, positions=positions)
            case "Patch":
                return Patch(AT, rows, positions)
            case "Project":
                return Project(AT, v, amount, positions=positions)
            case "Cap":
                return Cap(AT, v, amount, min=amount - 1 if seed % 2 else None, positions=positions)
            case "Swap":
                return Swap(AT, v, w, positions=positions)
            case "Ablate":
                return Ablate(AT, ("zero", "mean", v)[seed % 3], positions=positions)
            case "SetFeature":
                way = ("value", "delta", "scale")[seed % 3]
                return SetFeature(AT, CODER, seed % N_LATENTS, **{way: amount}, positions=positions)  # type: ignore[arg-type]
            case "Reconstruct":
                return Reconstruct(EARLIER if seed % 2 else AT, AT, CODER, seed % 3 == 0, positions=positions)
        raise ValueError(kind)


PLAIN = ["Add", "Scale", "Replace", "Freeze", "Patch", "Project", "Cap", "Swap", "Ablate"]
SELECTORS = [None, 1, "2:4", "last_prompt", ("prompt", Tokens((3, 9))), ("last_prompt", "generated"), "3:"]


def samples(
    kinds: Sequence[str] = (*PLAIN, "SetFeature", "Reconstruct"), dtype: Any = None
) -> st.SearchStrategy[Sample]:
    amounts = st.floats(-8, 8, width=32)
    dtypes = st.sampled_from(DTYPES) if dtype is None else st.just(dtype)
    return st.builds(
        Sample, st.sampled_from(list(kinds)), dtypes, st.sampled_from(SELECTORS), st.integers(1, 10**6), amounts
    )
