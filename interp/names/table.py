"""What other tools call our points, where the answer is the same on every family.

`transformer_lens` is its bridge (3.x). Its legacy class shares the names below on unfolded weights, but not
`blocks.N.hook_mlp_in` and `blocks.N.hook_attn_in`: those are the stream before the norm, and are in no row.
"""

from typing import NamedTuple

from interp.errors import UserError
from interp.points import Address


class Name(NamedTuple):
    """One name of one tool; `{l}` stands for the layer."""

    tool: str
    pattern: str
    point: str


TOOLS = {
    "transformer_lens": "TransformerLens",
    "nnterp": "nnterp",
    "circuit_tracer": "circuit-tracer",
    "sae_lens": "SAELens",
    "gemma_scope": "Gemma Scope",
    "sparsify": "sparsify",
}

NAMES = (
    Name("transformer_lens", "blocks.{l}.hook_resid_pre", "resid_pre"),
    Name("transformer_lens", "blocks.{l}.hook_in", "resid_pre"),
    Name("transformer_lens", "blocks.{l}.attn.hook_in", "attn_in"),
    Name("transformer_lens", "blocks.{l}.attn.hook_v", "value"),
    Name("transformer_lens", "blocks.{l}.attn.hook_attn_scores", "attn_scores"),
    Name("transformer_lens", "blocks.{l}.attn.hook_pattern", "attn_probs"),
    Name("transformer_lens", "blocks.{l}.attn.hook_z", "z"),
    Name("transformer_lens", "blocks.{l}.attn.hook_out", "attn_out"),
    Name("transformer_lens", "blocks.{l}.hook_attn_out", "attn_out_post"),
    Name("transformer_lens", "blocks.{l}.hook_resid_mid", "resid_mid"),
    Name("transformer_lens", "blocks.{l}.mlp.hook_in", "mlp_in"),
    Name("transformer_lens", "blocks.{l}.mlp.hook_out", "mlp_out"),
    Name("transformer_lens", "blocks.{l}.hook_mlp_out", "mlp_out_post"),
    Name("transformer_lens", "blocks.{l}.hook_resid_post", "resid_post"),
    Name("transformer_lens", "ln_final.hook_out", "final_norm"),
    Name("nnterp", "token_embeddings", "embeddings"),
    Name("nnterp", "layers_input[{l}]", "resid_pre"),
    Name("nnterp", "attentions_input[{l}]", "attn_in"),
    Name("nnterp", "attention_probabilities[{l}]", "attn_probs"),
    Name("nnterp", "attentions_output[{l}]", "attn_out"),
    Name("nnterp", "mlps_input[{l}]", "mlp_in"),
    Name("nnterp", "mlps_output[{l}]", "mlp_out"),
    Name("nnterp", "layers_output[{l}]", "resid_post"),
    Name("circuit_tracer", "blocks.{l}.hook_mlp_out", "mlp_out_post"),
    Name("sae_lens", "blocks.{l}.hook_mlp_out", "mlp_out_post"),
    Name("sae_lens", "blocks.{l}.hook_resid_post", "resid_post"),
    Name("gemma_scope", "layer_{l}/mlp", "mlp_out_post"),
    Name("gemma_scope", "layer_{l}/res", "resid_post"),
    Name("gemma_scope", "layer_{l}/att", "z"),
    Name("sparsify", "layers.{l}.mlp", "mlp_out"),
    Name("sparsify", "layers.{l}", "resid_post"),
)


def names_of(address: Address | str, tool: str) -> list[str]:
    """Every name that `tool` has for `address`; empty where it has none that holds on every family.

    No tool's name here picks one head or one stream, so an Address that does has none.
    """
    address = Address.parse(address)
    _check(tool)
    if address != address.whole:
        return []
    found = [name.pattern for name in NAMES if name.tool == tool and name.point == address.name]
    return [pattern.format(l=address.layer) for pattern in found]


def point_of(name: str, tool: str) -> Address:
    """The Address that `tool` calls `name`. Raises `UserError` where no name of that tool holds on every family."""
    _check(tool)
    for row in NAMES:
        if row.tool == tool and (found := _match(row.pattern, name)) is not None:
            return Address(row.point, found if "{l}" in row.pattern else None)
    known = ", ".join(row.pattern.format(l="N") for row in NAMES if row.tool == tool)
    raise UserError(f"{TOOLS[tool]}'s {name!r} has no meaning that holds on every family; those that do: {known}.")


def _check(tool: str) -> None:
    if tool not in TOOLS:
        raise UserError(f"No tool is called {tool!r} here; known: {', '.join(TOOLS)}.")


def _match(pattern: str, name: str) -> int | None:
    """The layer in `name`, 0 where the pattern has none; None where it does not match."""
    before, mark, after = pattern.partition("{l}")
    if not mark:
        return 0 if name == pattern else None
    middle = name[len(before) : len(name) - len(after)] if after else name[len(before) :]
    fits = name.startswith(before) and name.endswith(after) and middle.isdecimal()
    return int(middle) if fits else None
