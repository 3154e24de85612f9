"""A sparse autoencoder: reconstructs the tensor that it reads."""

from typing import ClassVar

from interp.dictionaries.base import Dictionary
from interp.dictionaries.config import ActivationConfig, ActivationName, DictionaryConfig, Kind


class SparseAutoencoder(Dictionary):
    """`SparseAutoencoder(d_in=640, n_latents=2560, k=32)`, or from a whole `config`."""

    kind: ClassVar[Kind] = "sae"

    def __init__(
        self,
        config: DictionaryConfig | None = None,
        *,
        d_in: int = 0,
        n_latents: int = 0,
        k: int | None = None,
        activation: ActivationName = "topk",
        subtract_b_dec: bool = True,
    ) -> None:
        super().__init__(
            config
            or DictionaryConfig(
                kind="sae",
                d_in=d_in,
                d_out=d_in,
                n_latents=n_latents,
                activation=ActivationConfig(activation, k),
                subtract_b_dec=subtract_b_dec,
            )
        )
