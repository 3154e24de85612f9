"""An edit that cannot do what it says is refused in a sentence before the model runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp.edits import (
    Ablate,
    Add,
    Cap,
    DictionaryReference,
    Edit,
    Freeze,
    Patch,
    Project,
    Reconstruct,
    Replace,
    SetFeature,
    Swap,
    Tokens,
)
from interp.engines.base import Request
from interp.engines.load import wrap
from interp.errors import PointRefused, UserError
from interp.models.tiny import tiny_model
from tests.families.loaded import F32, engine, readable

TOKENS = [11, 64, 2]
V = torch.linspace(-1, 1, 48)


class Coder:
    """Encodes 48 channels, gives `d_out`."""

    def __init__(self, d_out: int = 48) -> None:
        self.d_out = d_out

    def encode(self, x: Tensor) -> Tensor:
        return x @ torch.ones(48, 9)

    def decode(self, z: Tensor) -> Tensor:
        return z @ torch.ones(9, self.d_out)


class Narrow(Coder):
    """Encodes 36 channels, gives 48."""

    def encode(self, x: Tensor) -> Tensor:
        return x @ torch.ones(36, 9)


CODER = Coder()

MISTAKES: list[tuple[Callable[[], Edit], int, type[Exception], str]] = [
    (lambda: Project("resid_post.0", V[:40]), 0, UserError, "40 wide, but the point is 48 wide"),
    (lambda: Cap("z.0", V, 1.0), 0, UserError, "48 wide, but the point is 10 wide"),
    (lambda: Swap("mlp_act.0", V, V.flip(0)), 0, UserError, "48 wide, but the point is 80 wide"),
    (lambda: Ablate("resid_post.0", V[:4]), 0, UserError, "4 wide"),
    (lambda: Freeze("resid_post.0", torch.ones(2, 48)), 0, UserError, "2 rows.*reaches position 2"),
    (lambda: Freeze("resid_post.0", torch.ones(5, 48)), 4, UserError, "5 rows.*reaches position 5"),
    (lambda: Patch("resid_post.0", torch.ones(3, 48), "generated"), 4, UserError, "3 rows.*reaches position 5"),
    (lambda: Replace("resid_post.0", torch.ones(4, 48), positions=Tokens(3)), 4, UserError, "reaches position 5"),
    (lambda: Freeze("attn_probs.0", torch.ones(6, 2, 2)), 0, UserError, r"shape \[6, 2, 2\]; give \[6, 3, 3\]"),
    (lambda: Add("resid_post.0", V, positions="generated"), 0, UserError, "would never act"),
    (lambda: Add("resid_post.0", V, positions="generated"), 1, UserError, "the last new token is chosen, not run"),
    (lambda: Add("resid_post.0", V, positions=5), 3, UserError, "5 lies after the 5 positions"),
    (lambda: Add("resid_post.0", V, positions=6), 3, UserError, "Position 6 of the edit at resid_post.0 is outside"),
    (lambda: Add("resid_post.0", V, positions=Tokens(12)), 0, UserError, "tokens 12 selects nothing in the prompt"),
    (lambda: SetFeature("resid_post.0", CODER, 9, value=0), 0, UserError, "Latent 9 does not exist: Coder has 9"),
    (lambda: SetFeature("mlp_act.0", CODER, 1, value=0), 0, UserError, "Coder does not encode mlp_act.0, 80 wide"),
    (lambda: Reconstruct("mlp_in.0", "mlp_out.0", Coder(40)), 0, UserError, "gives 40 channels, but mlp_out.0 is 48"),
    (lambda: Reconstruct("mlp_out.1", "mlp_in.1", CODER), 0, UserError, "mlp_out.1 is computed later"),
    (lambda: Reconstruct("resid_post.1", "resid_post.0", CODER), 0, UserError, "resid_post.1 is computed later"),
    (lambda: Reconstruct("final_norm", "resid_post.2", CODER), 0, UserError, "final_norm is computed later"),
    (lambda: Reconstruct("mlp_normalized.1", "mlp_in.0", CODER), 0, UserError, "mlp_normalized.1 is computed later"),
    (lambda: Reconstruct("expert_out.1", "mlp_out.1", CODER), 0, PointRefused, "no router"),
    (lambda: Reconstruct("mlp_in.1", "mlp_normalized.1", CODER), 0, PointRefused, "read but not written"),
    (
        lambda: Reconstruct("mlp_in.1", "mlp_out.1", DictionaryReference("no/such/folder", "0" * 64)),
        0,
        UserError,
        "No dictionary in no/such/folder",
    ),
    (
        lambda: Reconstruct("head_out.1", "mlp_in.1", CODER),
        0,
        UserError,
        r"\[6, 48\] per position, for mlp_in\.1, \[48\]",
    ),
    (lambda: Ablate("attn_probs.1"), 2, UserError, "max_new_tokens=0"),
]


BETWEEN: list[tuple[Callable[[], Edit], int, type[Exception], str]] = [
    (lambda: Add("resid_post.0", V), 0, UserError, "48 wide, but the point is 36 wide"),
    (lambda: Add("embeddings", V), 0, UserError, "48 wide, but the point is 36 wide"),
    (lambda: Add("adapter_out", V[:36]), 0, UserError, "36 wide, but the point is 48 wide"),
    (lambda: Cap("z.0", V[:10], 1.0), 0, UserError, "10 wide, but the point is 14 wide"),
    (lambda: Replace("z.1", torch.ones(3, 4, 10)), 0, UserError, r"shape \[3, 4, 10\], but the point is \[6, 10\]"),
    (lambda: Swap("mlp_act.0", V, V.flip(0)), 0, UserError, "48 wide, but the point is 52 wide"),
    (lambda: Freeze("attn_probs.0", torch.ones(6, 3, 3)), 0, UserError, r"shape \[6, 3, 3\]; give \[4, 3, 3\]"),
    (lambda: Reconstruct("adapter_out", "mlp_out.0", CODER), 0, UserError, "adapter_out is computed later"),
    (lambda: Reconstruct("resid_pre.1", "adapter_out", CODER), 0, UserError, "resid_pre.1 is computed later"),
    (lambda: Reconstruct("resid_post.0", "mlp_out.1", CODER), 0, UserError, "does not encode resid_post.0, 36 wide"),
]
"""On a model whose first layer is narrower than the others, with an adapter behind it."""
CELLS = [("llama", *mistake) for mistake in MISTAKES] + [("split_llama", *mistake) for mistake in BETWEEN]


@pytest.mark.parametrize(("family", "make", "new", "kind", "sentence"), CELLS, ids=[m[4] for m in CELLS])
def test_a_mistake_is_found_before_any_forward(
    family: str, make: Callable[[], Edit], new: int, kind: type[Exception], sentence: str
) -> None:
    model = engine(family, F32)
    seen: list[int] = []
    handle = model.anatomy.embeddings.module.register_forward_pre_hook(lambda m, a: seen.append(1))
    try:
        with pytest.raises(kind, match=sentence) as error:
            model.run([Request([1, 2]), Request(TOKENS, edits=[make()], max_new_tokens=new)])
    finally:
        handle.remove()
    assert not seen
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt2", "gpt_neox_parallel", "granite", "qwen3_moe", "split_llama"]
)
def test_every_point_before_the_output_is_there_when_the_output_is_written(family: str) -> None:
    """What the order allows, the forward pass holds: any point of layer 1 read, resid_post.1 written."""
    model = engine(family, F32)
    count = 0
    for at in readable(model, layers=[1]):
        try:
            edit = Reconstruct(at, "resid_post.1", CODER)
            model.run([Request(TOKENS, edits=[edit])])
            count += 1
        except UserError as error:
            known = ("computed later", "does not encode", "per position, for", "cannot be read by an edit")
            assert any(reason in str(error) for reason in known), (at, error)
    assert count >= 8


def test_what_stands_before_the_adapter_is_there_when_its_output_is_written() -> None:
    model, narrow = engine("split_llama", F32), torch.linspace(-1, 1, 36)
    for at in ("resid_post.0", "embeddings"):
        (plain,) = model.run([Request(TOKENS, capture=["adapter_out"])])
        edits = [Add(at, narrow), Reconstruct(at, "adapter_out", Narrow())]
        (result,) = model.run([Request(TOKENS, capture=[at, "adapter_out"], edits=edits)])
        right = Narrow().decode(Narrow().encode(result.capture[at]))
        assert torch.equal(result.capture["adapter_out"], right) and not torch.equal(
            plain.capture["adapter_out"], right
        )


def test_an_embedding_that_a_projection_widens_has_its_own_width() -> None:
    model = wrap(tiny_model("opt, projected embedding"), prove=False)
    (plain,) = model.run([Request(TOKENS, capture=["embeddings"])])
    v = torch.linspace(-1, 1, 32, dtype=torch.float64)
    (result,) = model.run([Request(TOKENS, capture=["embeddings"], edits=[Add("embeddings", v)])])
    assert torch.equal(result.capture["embeddings"], plain.capture["embeddings"] + v)
    with pytest.raises(UserError, match="48 wide, but the point is 32 wide"):
        model.run([Request(TOKENS, edits=[Add("embeddings", torch.ones(48))])])


def test_rows_that_no_position_needs_may_be_missing() -> None:
    model = engine("llama", F32)
    rows = torch.ones(5, 48)
    model.run([Request(TOKENS, edits=[Freeze("resid_post.0", rows)], max_new_tokens=3)])
    model.run([Request(TOKENS, edits=[Patch("resid_post.0", rows[:1], 0)], max_new_tokens=3)])
