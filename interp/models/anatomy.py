"""Which module plays which role: the map from Addresses to live modules, found by `resolve` or written by hand."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from interp.models.inside import Inside
from interp.models.linear import Linear, products
from interp.models.norms import Norm
from interp.models.probe import Key
from interp.models.rerun import Rerun
from interp.models.transforms import Clip, Scale, Step
from interp.models.weighting import Ranking, Weighting
from interp.points import Address

Side = Literal["input", "output", "function", "shares", "attention", "softmax"]
"""`function`: what a torch function returns inside the module; `shares`: what each selected expert adds to the module's
output; `attention`: what a registered attention function holds; `softmax`: what a module's own softmax takes and gives.
"""
MATRIX_SIDES = ("attention", "softmax")


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """Where an Address lives: a module, which tensor of its call, and the steps from that tensor to the point."""

    path: str
    module: nn.Module
    side: Side
    key: Key
    """Positional index, keyword or tuple element; a field of `AttentionCall` on the two attention sides."""
    steps: tuple[Step, ...] = ()
    inside: Inside | None = None
    """On the side `function`: which function call's result."""
    masking: "Tap | None" = None
    """On the side `shares`: the weights of the experts; all but one are zero while that one's share is computed."""

    @property
    def writable(self) -> bool:
        made_inside = self.side == "shares" or (self.side == "softmax" and self.key in ("query", "key"))
        return not made_inside and all(step.writable for step in self.steps)

    @property
    def transform(self) -> str:
        """The steps in words; empty where the module's tensor is the point."""
        return ", ".join(str(step) for step in (*((self.inside,) if self.inside else ()), *self.steps))

    def read(self, x: Tensor) -> Tensor:
        """The point's tensor, from the module's ([batch, pos, ...] both)."""
        for step in self.steps:
            x = step.read(x)
        return x

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        """The module's tensor that reads as `new`; `x` supplies what the point does not cover."""
        stages = [x]
        for step in self.steps[:-1]:
            stages.append(step.read(stages[-1]))
        for step, stage in zip(reversed(self.steps), reversed(stages), strict=False):
            new = step.write(stage, new)
        return new

    def then(self, *steps: Step) -> "Tap":
        """This tap with further steps."""
        return replace(self, steps=self.steps + steps)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a point cannot be served here."""

    reason: str
    nearest: tuple[str, ...] = ()
    """Points of the same layer that come closest."""


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """How a sublayer of a trunk of several streams reads one vector from them and writes its output back."""

    collapse: Tap
    """[d_model]: what its norm reads."""
    write: Tap
    """[streams]: what its output is multiplied by on its way to each stream."""
    mix: Tap | Refusal
    """[streams, streams]: how much of the first goes to the second."""


@dataclass(frozen=True, slots=True, eq=False)
class Sublayer:
    """One addition to the stream: what it reads, what its module returns, what is added."""

    path: str
    read: Tap | Refusal
    raw: Tap
    contribution: Tap
    pre_norm: Norm | None
    pre_norm_input: Tap | None
    post_norm: Norm | None
    post_norm_input: Tap | None
    multiplier: float
    entry: Tap
    """Where it takes the stream: at its norm, at its module, or where several streams are collapsed to one."""
    reads: int = 0
    """After how many of the block's stream steps it reads the stream."""
    stack: Stack | None = None
    by_token: bool = False
    """Whether it is handed integers, too: token ids that choose experts, positions."""
    unknown: str = ""
    """What stands between the stream and the module, where that is neither nothing nor a known norm."""


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Queries, keys or values: channels of a linear map of what the attention reads."""

    tap: Tap
    linear: Linear
    index: Tensor
    """[heads, d_head]: channel numbers in the linear map's output."""
    of_input: bool
    """Whether the linear map reads what the attention module received, and not a latent made from it."""
    clip: Clip | None = None
    """Bounds that its output is held between before it is used."""
    norm: Norm | None = None
    """Norm of each head that it goes through before it is used."""

    @property
    def weight(self) -> Tensor:
        """[heads, d_head, d_in]"""
        return self.linear.weight[self.index.to(self.linear.weight.device)]

    @property
    def bias(self) -> Tensor | None:
        """[heads, d_head], or None."""
        bias = self.linear.bias
        return None if bias is None else bias[self.index.to(bias.device)]

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Its channels of what the linear map makes of x, [..., heads · d_head], and the summands' magnitude."""
        index = self.index.flatten()
        if self.linear.packed is None:
            bias = self.bias
            return products(x, self.weight.flatten(0, 1), None if bias is None else bias.flatten())
        y, magnitude = self.linear.sums(x)
        return y[..., index.to(y.device)], magnitude[..., index.to(y.device)]


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """The inside of softmax attention."""

    module: nn.Module
    """The module that calls the attention function."""
    path: str
    query: Projection | Refusal
    key: Projection | Refusal
    value: Projection | Refusal
    z: Tap | Refusal
    output: Linear | Refusal
    q_norm: Norm | Refusal
    q_norm_tap: Tap | Refusal
    k_norm: Norm | Refusal
    k_norm_tap: Tap | Refusal
    n_heads: int
    n_kv_heads: int
    d_head: int
    scaling: float | None = None
    """What the score product is multiplied by, as the family hands it to the attention function."""
    softcap: float | None = None
    key_repeats: int = 1
    """How often each key head stands in what the product with the queries is given."""
    biased: bool = False
    """Whether something is added to the scores before the softmax: a bias by distance, as in ALiBi."""
    sink: bool = False
    """Whether a row of the attention matrix sums to less than 1."""
    side: Side = "attention"
    """Where its matrix is seen."""
    gate: Projection | Refusal = Refusal("this attention has no gate", ("z",))
    gate_activation: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Neurons:
    """The inside of a dense MLP: down(act(pre) · pre_linear), or down(act(pre)) where it has no gate."""

    down: Linear
    multiplier: float
    act: Tap
    pre: Tap | Refusal
    pre_linear: Tap | Refusal
    activation: Callable[[Tensor], Tensor] | None
    projection: Projection | None = None
    """What gives `pre`; None where that is no slice of a projection's output."""


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """The stream gets the sum of these points of its layer; each of several streams gets `write` times it."""

    points: tuple[str, ...]
    write: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Weigh:
    """The stream is multiplied by a constant, or each channel of it by one."""

    factor: float | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Renorm:
    """The stream goes through a norm."""

    norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class Remix:
    """Several streams are replaced by weighted sums of them; the point holds the weights, [from, to]."""

    point: str


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The inside of a sparse MLP: a linear map scores the experts, some are selected, their outputs are weighed."""

    n_selected: int
    logits: Tap | Refusal
    weights: Tap | Refusal
    indices: Tap | Refusal
    shares: Tap | Refusal
    """Each selected expert's weighted output."""
    matrix: Tensor
    """[experts, d_in]: the live parameter or a view of it."""
    bias: Tensor | None
    of_input: bool
    """Whether the linear map reads what the MLP receives, and not something made of it."""
    weighting: Weighting | Refusal
    """From logits to the selected experts' weights."""
    ranking: Ranking | None
    """By what the selected are the best; None where it is no known function of the logits."""
    n_groups: int
    """Groups of experts of which only some take part in the selection; 1 where all do."""
    sublayer: Rerun | Refusal
    """The MLP by itself, to be run with a selection of experts that is handed to it."""


StreamStep = Add | Weigh | Renorm | Remix


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One block of the trunk."""

    path: str
    module: nn.Module
    group: int
    input: Tap
    output: Tap
    attn: Sublayer | Refusal
    mlp: Sublayer | Refusal
    mid: Tap | Refusal
    mixer: Mixer | Refusal
    neurons: Neurons | Refusal
    parallel: bool
    steps: tuple[StreamStep, ...] = ()
    """What happens to the stream from resid_pre to resid_post."""
    steps_to_mid: int = 0
    """How many of them lead to resid_mid; 0 where it does not exist."""
    extra: Tap | Refusal = Refusal("this block adds nothing to the stream but attention and MLP")
    routing: Routing | Refusal = Refusal("this block has no sparse MLP", ("mlp_out",))

    @property
    def plain(self) -> bool:
        """Whether the stream is only added to, by attention and MLP alone."""
        named = {"attn_out_post", "mlp_out_post"}
        return all(isinstance(s, Add) and s.write is None and named.issuperset(s.points) for s in self.steps)


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One addend of the stream that enters the first block."""

    kind: Literal["token", "position"]
    tap: Tap
    via: Linear | None = None
    """The linear map that widens the embedding to the stream, where a family has one."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """How the stream begins: the sum of its terms, through a norm where the family has one there."""

    terms: tuple[Term, ...]
    norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A module of which only the ends are known."""

    path: str
    module: nn.Module


Piece = Linear | Norm | Network | Scale | Callable[[Tensor], Tensor]
"""What stands between two places of the trunk: a map, a norm, a network, a factor, or a function of each element."""


def through_pieces(pieces: Iterable[Piece], x: Tensor) -> Tensor:
    """What the real modules make of x, [..., d_in] to [..., d_out]."""
    for piece in pieces:
        if isinstance(piece, (Linear, Norm, Network)):
            x = piece.module(x)
        else:
            x = piece.read(x) if isinstance(piece, Scale) else piece(x)
    return x


@dataclass(frozen=True, slots=True, eq=False)
class Bridge:
    """What makes the stream of one group of blocks into that of the next."""

    layer: int
    """The layer before it."""
    d_in: int
    """Width of the stream that it reads."""
    output: Tap
    """What enters the next block."""
    pieces: tuple[Piece, ...] | Refusal


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """From the unembedding's input x to logits: cap · tanh((W x + b) · scale / cap); without cap (W x + b) · scale."""

    linear: Linear
    scale: float = 1.0
    cap: float | None = None
    before: tuple[Piece, ...] = ()
    """What stands between the final norm's output and the unembedding: a factor, a projection, a small network."""

    def unembed(self, x: Tensor) -> Tensor:
        """Logits from the final norm's output, [..., d_model] to [..., d_vocab], through the real modules."""
        return self.logits(self.linear.module(through_pieces(self.before, x)))

    def logits(self, lm_head: Tensor) -> Tensor:
        """Logits from the unembedding module's own output, [..., d_vocab]."""
        if self.cap is not None:
            return (lm_head * (self.scale / self.cap)).tanh() * self.cap
        return lm_head if self.scale == 1.0 else lm_head * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """Roles of a whole model."""

    model: nn.Module
    embeddings: Tap
    start: Start | Refusal
    """What resid_pre.0 is made of."""
    blocks: tuple[Block, ...]
    d_model: int
    """Width of the stream that leaves the last block."""
    n_streams: int
    """How many streams the trunk carries side by side; 1 but for hyper-connections."""
    collapse: Tap | None
    """What makes one vector of several streams before the final norm."""
    trunk: str
    """Path of the module whose output is the final norm's: it runs everything but the head."""
    final_norm: Norm | Refusal
    final_norm_input: Tap | Refusal
    final_norm_output: Tap
    head: Head | Refusal
    lm_head: Tap | Refusal
    logits: Tap
    refused: dict[Address, Refusal]
    """Points whose proof failed; filled when the proofs have run."""
    bridges: Mapping[int, Bridge] = field(default_factory=dict)
    """Between groups of blocks, by the layer before each."""

    def width(self, layer: int) -> int:
        """Width of the stream in `layer`."""
        return next((self.bridges[i].d_in for i in sorted(self.bridges) if layer <= i), self.d_model)

    def tap(self, address: Address) -> Tap | Refusal:
        """Where `address` lives, or why it lives nowhere."""
        from interp.models.taps import tap_of

        if (refusal := self.refused.get(address.whole)) is not None:
            return refusal
        return tap_of(self, address)


def scaled(tap: Tap, factor: float) -> Tap:
    """`tap` times a constant."""
    return tap if factor == 1.0 else tap.then(Scale(factor))
