"""One block as linear maps: what its contributions are made of once attention patterns and norm scales are fixed."""

from dataclasses import dataclass

from torch import Tensor

from interp.models.anatomy import Anatomy, Mixer, Refusal, Sublayer
from interp.models.norms import Norm
from interp.points import Address


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """y = (x - mean(x)) / scale · gain + bias; without the mean where not `centred`."""

    gain: Tensor
    """[d_model]"""
    bias: Tensor | None
    """[d_model]"""
    centred: bool

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """What `x` ([..., d_model]) adds to y with the denominator held fixed; the bias is not its."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x / scale * self.gain

    def adjoint(self, g: Tensor, scale: Tensor) -> Tensor:
        """Gradient with respect to x, from `g` with respect to y ([..., d_model]); the denominator [..., 1] fixed."""
        g = g * self.gain / scale
        return g - g.mean(-1, keepdim=True) if self.centred else g


@dataclass(frozen=True, slots=True, eq=False)
class SublayerWeights:
    """A sublayer's surroundings: contribution = multiplier · post(core(pre(stream)))."""

    pre: NormWeights | None
    post: NormWeights | None
    multiplier: float


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeights:
    """Weights of one block that the frozen, linear forward pass needs."""

    attn: SublayerWeights
    mlp: SublayerWeights
    W_V: Tensor
    """[n_kv_heads, d_head, d_model]"""
    b_V: Tensor | None
    """[n_kv_heads, d_head]"""
    W_O: Tensor
    """[d_model, n_heads, d_head]"""
    b_O: Tensor | None
    """[d_model]"""
    parallel: bool


NEEDED = ("attn_probs", "value", "z", "attn_in", "attn_out", "attn_out_post", "mlp_in", "mlp_out", "mlp_out_post")


def block_weights(anatomy: Anatomy, layer: int) -> BlockWeights | Refusal:
    """The block's weights; a Refusal where its value path is not the linear one, or a claim that it rests on failed."""
    block = anatomy.blocks[layer]
    for name in NEEDED:
        tap = anatomy.tap(Address(name, layer))
        if isinstance(tap, Refusal):
            return Refusal(f"{name}.{layer} is not there: {tap.reason}")
    if not block.plain:
        return Refusal("the block weighs or norms its stream, or adds a further term to it")
    mixer, attn, mlp = block.mixer, block.attn, block.mlp
    if not (isinstance(mixer, Mixer) and isinstance(attn, Sublayer) and isinstance(mlp, Sublayer)):
        return Refusal("the block has no attention and MLP of the known kinds")
    norms = {
        "attn_norm_scale": attn.pre_norm,
        "attn_post_norm_scale": attn.post_norm,
        "mlp_norm_scale": mlp.pre_norm,
        "mlp_post_norm_scale": mlp.post_norm,
    }
    for name, norm in norms.items():
        tap = anatomy.tap(Address(name, layer))
        if norm is not None and isinstance(tap, Refusal):
            return Refusal(f"{name}.{layer} is not there: {tap.reason}")
    if isinstance(mixer.value, Refusal):
        return mixer.value
    if not isinstance(mixer.gate, Refusal):
        return Refusal("its attention is gated")
    if mixer.value.clip is not None or mixer.value.norm is not None:
        return Refusal("its values are clipped or normed")
    if not mixer.value.of_input:
        return Refusal("its values are made from a latent, not from what the attention reads")
    if isinstance(mixer.output, Refusal):
        return mixer.output
    for linear in (mixer.value.linear, mixer.output):
        if linear.refusal:
            return Refusal(linear.refusal)
    output = mixer.output.weight
    return BlockWeights(
        attn=_around(attn),
        mlp=_around(mlp),
        W_V=mixer.value.weight,
        b_V=mixer.value.bias,
        W_O=output.reshape(output.shape[0], mixer.n_heads, mixer.d_head),
        b_O=mixer.output.bias,
        parallel=block.parallel,
    )


def norm_weights(norm: Norm, like: Tensor | None = None) -> NormWeights:
    """The norm's effective gain and bias, of the dtype and device of `like` if it is given."""
    gain, bias = norm.gain, norm.bias
    if like is not None:
        gain, bias = gain.detach().to(like), None if bias is None else bias.detach().to(like)
    return NormWeights(gain, bias, norm.centred)


def _around(sublayer: Sublayer) -> SublayerWeights:
    pre, post = (norm if norm is None else norm_weights(norm) for norm in (sublayer.pre_norm, sublayer.post_norm))
    return SublayerWeights(pre, post, sublayer.multiplier)
