"""Rows sum to the logit before its cap, and each is what the logit loses without it when every denominator is held."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.analysis import direct_logit_attribution
from interp.edits import Ablate, Edit, Replace
from interp.engines.base import Capture, Request
from interp.engines.eager import EagerEngine
from interp.errors import PointRefused, UserError
from tests.analysis.subjects import CAP, CLEAN, FAMILIES, other, own_logits, reader, subject
from tests.families.tiny import SPLIT_LLAMAS

TOKEN, MINUS = 5, 99
UNLIKE = {
    "opt, norm behind": "the stream itself is normed in every block",
    "opt, projected embedding": "a projection after the embedding, one before the unembedding",
    "minicpm3": "a factor before the unembedding",
    "phi, query norm": "an unembedding with a bias",
    "gemma4_text": "the stream is multiplied by a constant, and something else is added",
    "falcon_h1": "a third term beside attention and MLP",
    "gpt_oss": "sparse, with sinks",
    "xglm": "positions without weights of their own",
}
NORM_AND_HEAD = {
    "gpt2": ("transformer.ln_f", "lm_head", 0.0, 1.0),
    "llama": ("model.norm", "lm_head", 0.0, 1.0),
    "gemma2": ("model.norm", "lm_head", 1.0, 1.0),
    "granite": ("model.norm", "lm_head", 0.0, 1 / 8.0),
    "gpt_neox_parallel": ("gpt_neox.final_layer_norm", "lm_head", 0.0, 1.0),
    "olmo2": ("model.norm", "lm_head", 0.0, 1.0),
    "cohere2": ("model.norm", "lm_head", 0.0, 0.0625),
    "split_llama": ("norm", "lm_head", 0.0, 1.0),
    "split_llama_mlp": ("norm", "lm_head", 0.0, 1.0),
}
"""Final norm, unembedding, what is added to the gain, and the factor of the logits, from transformers' source."""
CENTRED = ("gpt2", "gpt_neox_parallel", "cohere2")


def frozen_logits(family: str, x: Tensor, scale: Tensor) -> Tensor:
    """Logits before the cap, of a stream that is normed with the given denominator, written out."""
    norm_path, head_path, offset, factor = NORM_AND_HEAD[family]
    norm, head = (subject(family).module.get_submodule(path) for path in (norm_path, head_path))
    x = x - x.mean(-1, keepdim=True) if family in CENTRED else x
    normed = x / scale * (norm.weight + offset)  # type: ignore[operator]
    bias = getattr(norm, "bias", None)
    return (normed if bias is None else normed + bias) @ head.weight.T * factor  # type: ignore[operator]


def at_the_end(family: str, got: Capture, part: str) -> Tensor:
    """A contribution as it arrives in the last stream: through the adapter's matrices and the mask of its ReLU."""
    if family not in SPLIT_LLAMAS or not part.endswith(".0"):
        return got[part]
    adapter: Any = subject(family).module.get_submodule("adapter")
    if family == "split_llama":
        return got[part] @ adapter.weight.T
    mask = adapter[0](got["resid_post.0"]) > 0
    return (got[part] @ adapter[0].weight.T * mask) @ adapter[2].weight.T


def difference(logits: Tensor) -> float:
    return float(logits[..., -1, TOKEN] - logits[..., -1, MINUS])


def captured(model: EagerEngine, names: list[str], edits: list[Edit] | None = None) -> Capture:
    return model.run([Request(CLEAN, capture=names, edits=edits or [])])[0].capture


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("minus", [None, MINUS])
@pytest.mark.parametrize("position", [-1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_sum_to_the_logit_before_its_cap(family: str, position: int, minus: int | None, heads: bool) -> None:
    model = subject(family)
    found = direct_logit_attribution(model, CLEAN, TOKEN, minus, position=position, heads=heads)
    own = own_logits(model, CLEAN)[position]
    assert found.logit == pytest.approx(float(own[TOKEN] - (0.0 if minus is None else own[minus])), abs=1e-12)
    z = CAP * torch.atanh(own / CAP) if family == "gemma2" else own
    right = float(z[TOKEN] - (0.0 if minus is None else z[minus]))
    assert found.before_cap == pytest.approx(right, abs=1e-11)
    assert abs(math.fsum(row.value for row in found.rows) - right) <= 1e-11
    assert abs(found.error) <= 1e-12 and found.error == found.total - found.before_cap
    assert found.position == position % 7 and not found.unsplit
    n_heads = (4 if family in SPLIT_LLAMAS else 6) + 6 + 6
    assert sum(row.head is not None for row in found.rows) == (n_heads if heads else 0)


def test_the_cap_is_no_part_of_the_sum() -> None:
    found = direct_logit_attribution(subject("gemma2"), CLEAN, TOKEN)
    assert found.softcap == CAP and found.logit == pytest.approx(CAP * math.tanh(found.before_cap / CAP), abs=1e-12)
    largest = int(own_logits(subject("gemma2"), CLEAN)[-1].abs().argmax())
    found = direct_logit_attribution(subject("gemma2"), CLEAN, largest)
    assert abs(found.total) > CAP > abs(found.logit) and "after the cap of 30" in str(found)
    assert direct_logit_attribution(subject("llama"), CLEAN, TOKEN).softcap is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_what_the_logit_loses_without_it(family: str) -> None:
    found = direct_logit_attribution(subject(family), CLEAN, TOKEN, MINUS)
    parts = [f"{kind}_out_post.{layer}" for layer in range(3) for kind in ("attn", "mlp")]
    got = captured(subject(family), ["resid_post.2", "final_norm_scale", "resid_pre.0", "resid_post.0", *parts])
    whole = difference(frozen_logits(family, got["resid_post.2"], got["final_norm_scale"]))
    assert whole == pytest.approx(found.before_cap, abs=1e-12)
    for part in parts:
        left = got["resid_post.2"] - at_the_end(family, got, part)
        without = difference(frozen_logits(family, left, got["final_norm_scale"]))
        assert found[part] == pytest.approx(whole - without, abs=1e-11)
    left = got["resid_post.2"] - at_the_end(family, got, "resid_pre.0")
    without = difference(frozen_logits(family, left, got["final_norm_scale"]))
    embedded = sum(row.value for row in found.rows if row.source.endswith(" embedding"))
    assert embedded == pytest.approx(whole - without, abs=1e-11)
    for layer in range(3):
        both = found[f"attn_out_post.{layer}"] + found[f"mlp_out_post.{layer}"]
        assert float(found.per_layer[layer]) == pytest.approx(both, abs=1e-12)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama", "granite", "gpt_neox_parallel", "cohere2", "split_llama"])
def test_a_head_is_what_ablating_it_takes_when_all_behind_it_is_held(family: str, layer: int) -> None:
    """A real ablation: z of one head is zeroed while the model runs, and every later contribution is held."""
    model = subject(family)
    found = direct_logit_attribution(model, CLEAN, TOKEN, MINUS, heads=True)
    later = [f"mlp_out_post.{layer}"] + [f"{k}_out_post.{at}" for at in range(layer + 1, 3) for k in ("attn", "mlp")]
    clean = captured(model, [*later, "resid_post.2", "final_norm_scale"])
    held = [Replace(name, clean[name]) for name in later]
    for head in range(4 if family == "split_llama" and layer == 0 else 6):
        ablated = captured(model, ["resid_post.2"], [Ablate(f"z.{layer}.head-{head}"), *held])
        lost = [
            difference(frozen_logits(family, x["resid_post.2"], clean["final_norm_scale"])) for x in (clean, ablated)
        ]
        assert found[f"head_out.{layer}.head-{head}"] == pytest.approx(lost[0] - lost[1], abs=1e-11)
        assert float(found.per_head[layer, head]) == found[f"head_out.{layer}.head-{head}"] != 0.0


@pytest.mark.parametrize(
    ("family", "path", "offset"),
    [
        ("gemma2", "model.layers.1.post_attention_layernorm", 1.0),
        ("olmo2", "model.layers.1.post_attention_layernorm", 0.0),
    ],
)
def test_a_head_before_a_norm_counts_with_the_norm_held(family: str, path: str, offset: float) -> None:
    model = subject(family)
    found = direct_logit_attribution(model, CLEAN, TOKEN, MINUS, heads=True)
    got = captured(model, ["head_out.1", "attn_out.1", "resid_post.2", "final_norm_scale"])
    gain = model.module.get_submodule(path).weight + offset  # type: ignore[operator]
    eps = model.module.config.rms_norm_eps  # type: ignore[union-attr]
    denominator = (got["attn_out.1"].square().mean(-1, keepdim=True) + eps).sqrt()  # type: ignore[operator]
    whole = difference(frozen_logits(family, got["resid_post.2"], got["final_norm_scale"]))
    for head in range(6):
        written = got["head_out.1"][:, head] / denominator * gain
        without = difference(frozen_logits(family, got["resid_post.2"] - written, got["final_norm_scale"]))
        assert found[f"head_out.1.head-{head}"] == pytest.approx(whole - without, abs=1e-11)


def test_the_biases_of_an_adapter_are_a_row() -> None:
    found = direct_logit_attribution(subject("split_llama_mlp"), CLEAN, TOKEN, MINUS)
    got = captured(subject("split_llama_mlp"), ["resid_post.0", "final_norm_scale"])
    adapter: Any = subject("split_llama_mlp").module.get_submodule("adapter")
    mask = adapter[0](got["resid_post.0"]) > 0
    constant = (adapter[0].bias * mask) @ adapter[2].weight.T + adapter[2].bias
    right = difference(frozen_logits("split_llama_mlp", constant, got["final_norm_scale"]))
    assert found["adapter's biases behind layer 0"] == pytest.approx(right, abs=1e-12) and abs(right) > 1e-3
    assert not any("adapter" in row.source for row in direct_logit_attribution(subject("split_llama"), CLEAN, 5).rows)


def test_biases_and_embeddings_are_rows() -> None:
    found = direct_logit_attribution(subject("gpt2"), CLEAN, TOKEN, heads=True)
    gpt2 = subject("gpt2").module.transformer  # type: ignore[union-attr]
    scale = captured(subject("gpt2"), ["final_norm_scale"])["final_norm_scale"][-1]
    g = gpt2.wte.weight[TOKEN]  # type: ignore[union-attr]
    assert found["final norm bias"] == pytest.approx(float(g @ gpt2.ln_f.bias), abs=1e-12)  # type: ignore[union-attr]
    d = (g * gpt2.ln_f.weight / scale).detach()  # type: ignore[union-attr, operator]
    d = d - d.mean()
    token, place = gpt2.wte.weight[CLEAN[-1]], gpt2.wpe.weight[6]  # type: ignore[union-attr]
    assert found["token embedding"] == pytest.approx(float(d @ token), abs=1e-12)
    assert found["position embedding"] == pytest.approx(float(d @ place), abs=1e-12)
    bias = gpt2.h[1].attn.c_proj.bias  # type: ignore[union-attr, index]
    assert found["attention's output bias in layer 1"] == pytest.approx(float(d @ bias), abs=1e-12)
    head = other("phi, query norm").module.lm_head  # type: ignore[union-attr]
    found = direct_logit_attribution(other("phi, query norm"), CLEAN, TOKEN, MINUS)
    assert found["unembedding bias"] == pytest.approx(float(head.bias[TOKEN] - head.bias[MINUS]), abs=1e-12)  # type: ignore[union-attr, index]


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("model_type", UNLIKE)
def test_other_trunks_and_heads_sum_as_well(model_type: str, heads: bool) -> None:
    found = direct_logit_attribution(other(model_type), CLEAN, TOKEN, MINUS, heads=heads)
    own = own_logits(other(model_type), CLEAN)
    cap = found.softcap
    right = difference(own if cap is None else cap * torch.atanh(own / cap))
    assert abs(found.total - right) <= 1e-12 and abs(found.before_cap - right) <= 1e-12
    split = {row.layer for row in found.rows if row.head is not None}
    assert split | set(found.unsplit) == ({0, 1, 2} if heads else set())


def test_layers_whose_heads_are_no_addends_stay_one_row_and_say_why() -> None:
    found = direct_logit_attribution(other("jamba"), CLEAN, TOKEN, heads=True)
    assert set(found.unsplit) == {0, 2} and "token mixer" in found.unsplit[0] and "layer 0 as one row" in str(found)
    assert found["attn_out_post.0"] != 0.0 and found["head_out.1.head-5"] != 0.0
    assert found.per_head.isnan().all(-1).tolist() == [True, False, True] and abs(found.error) <= 1e-12


@pytest.mark.parametrize(("model_type", "said"), [("modernbert-decoder", "network"), ("hy_v4", "carries 3 streams")])
def test_what_is_not_linear_is_refused(model_type: str, said: str) -> None:
    with pytest.raises(PointRefused, match=said):
        direct_logit_attribution(other(model_type), CLEAN, TOKEN)


def test_it_reads_as_a_table_with_the_largest_first() -> None:
    found = direct_logit_attribution(reader(), "w1 w2 w3", "w4", "w5", heads=True)
    assert (found.token, found.minus) == (reader().tokenizer.convert_tokens_to_ids("w4"), found.token + 1)
    title, header, *rows = str(found).splitlines()
    assert title == "logit of 'w4' minus 'w5' at position 3" and header.split() == ["source", "adds"]
    sizes = [abs(row.value) for row in found.largest(20)]
    assert sizes == sorted(sizes, reverse=True) and rows[0].split()[0] == found.largest(1)[0].source
    assert rows[-3].startswith(f"{len(found.rows) - 20} smaller rows") and rows[-2].split() == [
        "sum",
        f"{found.total:+.4f}",
    ]
    with pytest.raises(KeyError, match=r"is no row; rows: token embedding, head_out\.0\.head-0"):
        found["attn_out_post.0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("w1 w2", "w3 w4"), "is 2 tokens here"),
        (("w1 w2", ""), "is 0 tokens here"),
        (("w1 w2", 131), "outside the vocabulary"),
        (("w1 w2", "w3", -1), "outside the vocabulary"),
    ],
)
def test_what_cannot_be_asked(arguments: tuple, said: str) -> None:
    with pytest.raises(UserError, match=said):
        direct_logit_attribution(reader(), *arguments)
    with pytest.raises(UserError, match="Position 3 is outside the prompt of 3 tokens"):
        direct_logit_attribution(reader(), "w1 w2", 5, position=3)
    with pytest.raises(UserError, match="has no tokenizer; give 'w1' as a token id"):
        direct_logit_attribution(subject("llama"), CLEAN, "w1")
