"""Every point: its name, its shape per token, and the one equation or sentence that defines it.

`x` enters a block, `y` leaves it; A and M are the attention and MLP modules, n1 and n2 the norms before them, p1 and p2
the norms after them (identity where absent), c a residual multiplier (1 where absent). A sequential block computes
a = A(n1 x), m = x + c·p1(a), y = m + c·p2(M(n2 m)); a parallel one y = x + c·a + c·M(n2 x).
"""

import difflib
from dataclasses import dataclass

HEAD_AXES = ("heads", "kv_heads")


@dataclass(frozen=True, slots=True)
class Point:
    """One row of the table."""

    name: str
    shape: tuple[str, ...]
    """Axes per token, by name; `query` and `key` stand for the positions of an attention matrix."""
    meaning: str
    """The equation, or the sentence, that makes the name a claim."""
    per_layer: bool = True
    writable: bool = True
    """Whether a new value here can reach everything that the model computes from it."""
    proof: str = ""
    """The proof that checks the claim (P1 to P8)."""

    @property
    def block_level(self) -> bool:
        """Per layer and d_model wide."""
        return self.per_layer and self.shape == ("d_model",)

    @property
    def has_heads(self) -> bool:
        """Whether an Address at this point may name a head."""
        return any(axis in HEAD_AXES for axis in self.shape)

    @property
    def matrix(self) -> bool:
        """Whether it is an attention matrix, [heads, query, key]."""
        return self.shape[-2:] == ("query", "key")

    @property
    def shape_text(self) -> str:
        """`heads x d_head`, as documents print it."""
        return " x ".join(self.shape)


def _rows() -> list[Point]:
    d, heads, kv = ("d_model",), ("heads", "d_head"), ("kv_heads", "d_head")
    matrix, one, vocab, mlp = ("heads", "query", "key"), ("1",), ("d_vocab",), ("d_mlp",)
    return [
        Point("embeddings", d, "output of the token embedding module", per_layer=False, proof="P2"),
        Point("resid_pre", d, "x: what enters the block; at layer 0 after position embedding and scale", proof="P2"),
        Point("attn_in", d, "what the attention module receives: n1(x), or x without a pre-norm", proof="P8"),
        Point("q_norm_in", heads, "what the query's norm receives", proof="P8"),
        Point("q_norm_out", heads, "what the query's norm returns", proof="P8"),
        Point("k_norm_in", kv, "what the key's norm receives", proof="P8"),
        Point("k_norm_out", kv, "what the key's norm returns", proof="P8"),
        Point("query", heads, "query projection, before its norm and rotation", proof="P5"),
        Point("key", kv, "key projection, before its norm and rotation", proof="P5"),
        Point("value", kv, "v, before mixing", proof="P5"),
        Point("query_rot", heads, "the query that the score product uses", proof="P5"),
        Point("key_rot", kv, "the key that the score product uses", proof="P5"),
        Point("attn_scores", matrix, "argument of the softmax: scaled, capped, masked", proof="P5"),
        Point("attn_probs", matrix, "softmax(attn_scores); rows sum to 1, less a sink's share", proof="P5"),
        Point("attn_gate", heads, "raw gate projection of gated attention", proof="P5"),
        Point("z", heads, "mixed values (attn_probs @ value), before the output projection", proof="P5"),
        Point("head_out", ("heads", "d_model"), "z_h W_O,h: each head's share of attn_out", writable=False, proof="P5"),
        Point("attn_out", d, "a: raw output of the attention module", proof="P5"),
        Point("attn_out_post", d, "c·p1(a): attention's contribution to the stream", proof="P1"),
        Point("resid_mid", d, "m = x + attn_out_post; does not exist in a parallel block", proof="P1"),
        Point("mlp_in", d, "what the MLP module receives", proof="P8"),
        Point("mlp_pre", mlp, "argument of the activation function (gate branch of a gated MLP)", proof="P6"),
        Point("mlp_pre_linear", mlp, "the other branch of a gated MLP", proof="P6"),
        Point("mlp_act", mlp, "neurons: what the down projection receives", proof="P6"),
        Point(
            "router_logits",
            ("experts",),
            "the router's linear map: W mlp_in + b, before any function of it",
            proof="P6",
        ),
        Point(
            "expert_weights",
            ("selected",),
            "what the selected experts' outputs are weighed with, in the router's own order",
            proof="P6",
        ),
        Point("expert_indices", ("selected",), "which experts the router selected", writable=False, proof="P6"),
        Point(
            "expert_out",
            ("selected", "d_model"),
            "each selected expert's weighted output: what it adds to mlp_out",
            writable=False,
            proof="P6",
        ),
        Point("mlp_out", d, "raw output of the MLP module", proof="P6"),
        Point("mlp_out_post", d, "c·p2(M(.)): the MLP's contribution to the stream", proof="P1"),
        Point("extra_out_post", d, "a further addition to the stream, where a family has one", proof="P1"),
        Point("resid_post", d, "y: what leaves the block", proof="P1"),
        Point(
            "attn_normalized",
            d,
            "x / scale before n1's gain and bias (centred first by LayerNorm)",
            writable=False,
            proof="P8",
        ),
        Point("mlp_normalized", d, "m / scale before n2's gain and bias", writable=False, proof="P8"),
        Point("attn_post_normalized", d, "a / scale before p1's gain and bias", writable=False, proof="P8"),
        Point("mlp_post_normalized", d, "M(.) / scale before p2's gain and bias", writable=False, proof="P8"),
        Point("attn_norm_scale", one, "n1's denominator, epsilon included", writable=False, proof="P8"),
        Point("mlp_norm_scale", one, "n2's denominator, epsilon included", writable=False, proof="P8"),
        Point("attn_post_norm_scale", one, "p1's denominator, epsilon included", writable=False, proof="P8"),
        Point("mlp_post_norm_scale", one, "p2's denominator, epsilon included", writable=False, proof="P8"),
        Point("resid_streams", ("streams", "d_model"), "a hyper-connection block's output stack", proof="P1"),
        Point("attn_stream_collapse", d, "sum of w_j stream_j: the one vector that attention's norm reads", proof="P1"),
        Point("mlp_stream_collapse", d, "sum of w_j stream_j: the one vector that the MLP's norm reads", proof="P1"),
        Point(
            "attn_stream_write",
            ("streams",),
            "what attn_out_post is multiplied by for each stream",
            writable=False,
            proof="P1",
        ),
        Point(
            "mlp_stream_write",
            ("streams",),
            "what mlp_out_post is multiplied by for each stream",
            writable=False,
            proof="P1",
        ),
        Point(
            "attn_stream_mix",
            ("streams", "streams"),
            "[j, k]: how much of stream j goes to stream k at attention",
            writable=False,
            proof="P1",
        ),
        Point(
            "mlp_stream_mix",
            ("streams", "streams"),
            "[j, k]: how much of stream j goes to stream k at the MLP",
            writable=False,
            proof="P1",
        ),
        Point(
            "adapter_out",
            d,
            "what an adapter between two groups of blocks makes of the stream; enters the next group",
            per_layer=False,
            proof="P2",
        ),
        Point(
            "final_normalized",
            d,
            "resid_post / scale before the final norm's gain and bias",
            per_layer=False,
            writable=False,
            proof="P8",
        ),
        Point(
            "final_norm_scale",
            one,
            "the final norm's denominator, epsilon included",
            per_layer=False,
            writable=False,
            proof="P8",
        ),
        Point("final_norm", d, "output of the final norm", per_layer=False, proof="P4"),
        Point(
            "lm_head",
            vocab,
            "the unembedding module's own output, before scale and softcap",
            per_layer=False,
            proof="P4",
        ),
        Point("logits", vocab, "after scale, bias and softcap", per_layer=False, writable=False, proof="P4"),
    ]


POINTS: dict[str, Point] = {point.name: point for point in _rows()}
STREAM_POINTS = ("resid_pre", "resid_mid", "resid_post")
"""The stream at its three places: in a trunk of several streams, an Address names one of them."""
BLOCK_POINTS: tuple[str, ...] = tuple(point.name for point in POINTS.values() if point.block_level)


def nearest_names(name: str, among: list[str] | None = None, n: int = 3) -> list[str]:
    """Up to `n` point names that read most like `name`."""
    return difflib.get_close_matches(name, among or list(POINTS), n=n, cutoff=0.0)
