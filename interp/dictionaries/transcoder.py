"""A transcoder: predicts a sublayer's output from its input, through latents and, by default, a linear skip path.

Transcoders: Dunefsky et al. 2024, arXiv:2406.11944. Skip transcoders: Paulo et al. 2025, arXiv:2501.18823.
"""

from typing import ClassVar

from interp.dictionaries.base import Dictionary
from interp.dictionaries.config import ActivationConfig, ActivationName, DictionaryConfig, Kind


class Transcoder(Dictionary):
    """`Transcoder(d_in=640, d_out=640, n_latents=2560, k=32, skip=True)`, or from a whole `config`.

    `b_dec` is never subtracted from the input.
    """

    kind: ClassVar[Kind] = "transcoder"

    def __init__(
        self,
        config: DictionaryConfig | None = None,
        *,
        d_in: int = 0,
        d_out: int = 0,
        n_latents: int = 0,
        k: int | None = None,
        activation: ActivationName = "topk",
        skip: bool = True,
    ) -> None:
        super().__init__(
            config
            or DictionaryConfig(
                kind="transcoder",
                d_in=d_in,
                d_out=d_out,
                n_latents=n_latents,
                activation=ActivationConfig(activation, k),
                skip=skip,
            )
        )
