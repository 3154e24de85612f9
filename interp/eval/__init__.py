"""Evaluation: how good a dictionary's reconstruction is and how sparse its latents are."""

from interp.eval.reconstruction import (
    Reconstruction,
    ReconstructionMeter,
    Sparsity,
    SparsityMeter,
    fraction_of_variance_unexplained,
)

__all__ = [
    "Reconstruction",
    "ReconstructionMeter",
    "Sparsity",
    "SparsityMeter",
    "fraction_of_variance_unexplained",
]
