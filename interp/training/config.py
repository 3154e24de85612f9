"""What a training run of transcoders is asked to do, documented field by field."""

from dataclasses import dataclass
from typing import Literal

from interp.errors import UserError
from interp.training.harvest import StoreDtype


@dataclass(frozen=True)
class TranscoderTrainingConfig:
    """One run: which points, how much text, which dictionaries, how they are fitted."""

    layers: tuple[int, ...] | None = None
    """Layers to train; None trains every layer of the model."""
    input_point: str = "mlp_in"
    """Name of the point that each transcoder reads."""
    output_point: str = "mlp_out"
    """Name of the point that it predicts, at the same layer."""
    total_tokens: int = 40_000
    """Tokens of training text that are harvested; fewer if the corpus is shorter."""
    held_out_tokens: int = 6_000
    """Tokens of other documents on which the result is measured."""
    context_len: int = 128
    """Tokens per row, BOS included."""
    expansion_factor: int = 4
    """Latents per input dimension."""
    activation_fn: Literal["topk"] = "topk"
    """Nonlinearity of the latents."""
    k: int = 32
    """Latents that may fire per token."""
    epochs: int = 3
    """Passes over the harvested tokens."""
    batch_size: int = 512
    """Tokens per optimisation step."""
    lr: float = 1e-3
    """Peak learning rate of Adam, on inputs of unit variance and targets of unit norm."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises; from there it falls to zero linearly."""
    harvest_batch_tokens: int = 2048
    """Tokens per forward pass of the model."""
    store_dtype: StoreDtype = "float16"
    """Precision of harvested activations on disk."""
    contexts_per_latent: int = 6
    """Rows of text kept for each latent, those in which it fires most."""
    seed: int = 0
    """Fixes the choice of documents, the initial weights and the order of tokens."""

    def __post_init__(self) -> None:
        for name in (
            "total_tokens", "held_out_tokens", "context_len", "expansion_factor", "k", "epochs", "batch_size",
            "harvest_batch_tokens", "contexts_per_latent",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not self.lr > 0:
            raise UserError(f"lr must be positive; got {self.lr}.")
        if self.warmup_steps < 0:
            raise UserError(f"warmup_steps cannot be negative; got {self.warmup_steps}.")
