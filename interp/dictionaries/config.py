"""What a dictionary is, apart from its weights: the contents of `config.json`, documented field by field."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from interp.errors import UserError

FORMAT_VERSION = 1
Kind = Literal["sae", "transcoder"]
ActivationName = Literal["topk", "relu", "jumprelu", "batchtopk"]


@dataclass(frozen=True)
class ActivationConfig:
    """The nonlinearity between the encoder's pre-activations and the latents."""

    name: ActivationName = "topk"
    """Which one: `topk`, `relu`, `jumprelu` or `batchtopk`."""
    k: int | None = None
    """How many latents may fire per token (`topk`) or per token on average (`batchtopk`)."""

    def __post_init__(self) -> None:
        if self.name not in get_args(ActivationName):
            raise UserError(
                f"No activation is called {self.name!r}; choose one of {', '.join(get_args(ActivationName))}."
            )
        counted = self.name in ("topk", "batchtopk")
        if counted and (self.k is None or self.k < 1):
            raise UserError(f"The activation {self.name} needs k, the number of latents that may fire; got {self.k}.")
        if not counted and self.k is not None:
            raise UserError(f"The activation {self.name} has no k; leave it out or choose topk.")


@dataclass(frozen=True)
class ModelReference:
    """The model that a dictionary was trained on."""

    id: str
    """What the user called it: a hub id, a packaged name, a directory."""
    revision: str | None = None
    """The hub revision, where there is one."""
    fingerprint: str = ""
    """Hash of the model's configuration and of a sample of its weights; empty where it is not known."""


@dataclass
class DictionaryConfig:
    """Everything about a dictionary but its weights. Saved as `config.json`, validated when read."""

    kind: Kind
    """`sae` reconstructs its own input; `transcoder` predicts another point."""
    d_in: int
    """Width of the input."""
    d_out: int
    """Width of the output; equal to `d_in` for an SAE."""
    n_latents: int
    """Number of latents."""
    activation: ActivationConfig
    """The nonlinearity; a JumpReLU's or BatchTopK's thresholds are weights."""
    skip: bool = False
    """Whether a linear map of the input (`W_skip`) is added to the output."""
    subtract_b_dec: bool = False
    """Whether `b_dec` is subtracted from the input; never for a transcoder, whose input and output are two spaces."""
    input_points: list[str] = field(default_factory=list)
    """Addresses whose tensors the dictionary reads."""
    output_points: list[str] = field(default_factory=list)
    """Addresses whose tensors it reconstructs."""
    input_hooks: list[str] = field(default_factory=list)
    """A custom architecture's own names of the input points; empty elsewhere."""
    output_hooks: list[str] = field(default_factory=list)
    """A custom architecture's own names of the output points; empty elsewhere."""
    model: ModelReference | None = None
    """The model whose activations it was trained on; None for one made by hand."""
    normalisation: dict[str, float] = field(default_factory=dict)
    """Scales used while training and folded into the weights since; the weights take and give raw activations."""
    excluded_token_ids: list[int] = field(default_factory=list)
    """Tokens that it was not trained on (BOS, padding); at their positions its output means nothing."""
    dtype: str = "float32"
    """Precision of the saved weights; thresholds are always float32."""
    tokens_seen: int = 0
    """Training tokens, repetitions counted."""
    training: dict[str, Any] = field(default_factory=dict)
    """The training configuration as it was run."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What was measured on held-out text."""
    format_version: int = FORMAT_VERSION
    """Version of this layout."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UserError(f"No dictionary kind is called {self.kind!r}; choose one of {', '.join(get_args(Kind))}.")
        for name in ("d_in", "d_out", "n_latents"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a positive integer; got {value!r}.")
        if self.activation.k is not None and self.activation.k > self.n_latents:
            raise UserError(f"k = {self.activation.k} exceeds the {self.n_latents} latents; choose a smaller k.")
        if self.kind == "sae" and self.d_in != self.d_out:
            raise UserError(f"An SAE reconstructs its input: d_out = {self.d_out} must equal d_in = {self.d_in}.")
        if self.kind == "sae" and self.skip:
            raise UserError("An SAE has no skip connection: it would copy its input; use a transcoder.")
        if self.kind == "transcoder" and self.subtract_b_dec:
            raise UserError("A transcoder never subtracts b_dec from its input: b_dec lives in the output's space.")

    @classmethod
    def from_json(cls, data: dict[str, Any], where: str) -> "DictionaryConfig":
        """The config that `data`, the parsed contents of `where`, describes. Raises `UserError` on any other layout."""
        version = data.get("format_version")
        if not isinstance(version, int):
            raise UserError(f"{where} has no format_version: it is not a dictionary of ours.")
        if version > FORMAT_VERSION:
            raise UserError(f"{where} has format version {version}, newer than {FORMAT_VERSION}; update interp.")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise UserError(f"{where} has fields that format version {version} does not know: {', '.join(unknown)}.")
        missing = [name for name in ("kind", "d_in", "d_out", "n_latents", "activation") if name not in data]
        if missing:
            raise UserError(f"{where} lacks {', '.join(missing)}.")
        values = dict(data)
        try:
            values["activation"] = ActivationConfig(**data["activation"])
            if data.get("model") is not None:
                values["model"] = ModelReference(**data["model"])
            return cls(**values)
        except TypeError as error:
            raise UserError(f"{where} is not a valid dictionary config: {error}.") from None
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
