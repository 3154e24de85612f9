"""What every dictionary does: encode a tensor into latents, decode latents into a tensor.

p = W_enc (x − s·b_dec) + b_enc        s = 1 for an SAE that subtracts its decoder bias, else 0
f = activation(p)
y = f W_dec + b_dec + W_skip x         W_skip only where the dictionary has a skip connection
"""

from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.dictionaries.activations import make_activation
from interp.dictionaries.config import DictionaryConfig, Kind
from interp.errors import InterpError

AnyDictionary = TypeVar("AnyDictionary", bound="Dictionary")


class Dictionary(nn.Module):
    """Encoder, activation and decoder. Weights: `W_enc` [n, d_in], `b_enc` [n], `W_dec` [n, d_out], `b_dec` [d_out],
    and `W_skip` [d_out, d_in] or None."""

    kind: ClassVar[Kind]

    def __init__(self, config: DictionaryConfig) -> None:
        super().__init__()
        self.config = config
        n, d_in, d_out = config.n_latents, config.d_in, config.d_out
        directions = F.normalize(torch.randn(n, d_in), dim=-1)
        self.W_enc = nn.Parameter(directions)
        self.b_enc = nn.Parameter(torch.zeros(n))
        self.W_dec = nn.Parameter(directions.clone() if config.kind == "sae" else torch.zeros(n, d_out))
        self.b_dec = nn.Parameter(torch.zeros(d_out))
        self.W_skip = nn.Parameter(torch.zeros(d_out, d_in)) if config.skip else None
        self.activation = make_activation(config.activation, n)

    def pre_activation(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... n"]:
        """Encoder output before the activation function."""
        if self.config.subtract_b_dec:
            x = x - self.b_dec
        return F.linear(x, self.W_enc, self.b_enc)

    def encode(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... n"]:
        """Latents, dense."""
        return self.activation(self.pre_activation(x))

    def encode_sparse(self, x: Float[Tensor, "... d_in"]) -> tuple[Float[Tensor, "... m"], Int[Tensor, "... m"]]:
        """Values and indices of the latents that fire, strongest first, padded with zeros where fewer than m fire.

        m is k for TopK, else the most that fire at one token.
        """
        return self.activation.sparse(self.pre_activation(x))

    def decode(
        self, latents: Float[Tensor, "... n"], x: Float[Tensor, "... d_in"] | None = None
    ) -> Float[Tensor, "... d_out"]:
        """The reconstruction. `x` is the input, needed where there is a skip connection (else `InterpError`)."""
        return self._add_skip(latents @ self.W_dec + self.b_dec, x)

    def decode_sparse(
        self,
        values: Float[Tensor, "... m"],
        indices: Int[Tensor, "... m"],
        x: Float[Tensor, "... d_in"] | None = None,
    ) -> Float[Tensor, "... d_out"]:
        """`decode` from what `encode_sparse` gives, reading only the decoder rows that fire."""
        m = values.shape[-1]
        bags = F.embedding_bag(indices.reshape(-1, m), self.W_dec, per_sample_weights=values.reshape(-1, m), mode="sum")
        return self._add_skip(bags.view(*values.shape[:-1], -1) + self.b_dec, x)

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """The reconstruction (SAE) or prediction (transcoder) from the input."""
        return self.decode(self.encode(x), x)

    def save(self, folder: str | Path) -> None:
        """Write `config.json` and `weights.safetensors` into `folder`, whole or not at all."""
        from interp.dictionaries.storage import save_dictionary

        save_dictionary(self, folder)

    @classmethod
    def load(
        cls: type[AnyDictionary],
        folder: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> AnyDictionary:
        """The dictionary that `save` wrote; raises `UserError` where the folder holds no valid one of this kind."""
        from interp.dictionaries.storage import load_dictionary

        loaded = load_dictionary(folder, device=device, dtype=dtype, kind=cls.kind)
        assert isinstance(loaded, cls)
        return loaded

    def _add_skip(self, y: Tensor, x: Tensor | None) -> Tensor:
        if self.W_skip is None:
            return y
        if x is None:
            raise InterpError(
                "This dictionary has a skip connection: decode needs the input as well, decode(latents, x)."
            )
        return y + F.linear(x, self.W_skip)
