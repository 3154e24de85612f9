"""The lens is the real final norm, head, factor and cap at every layer, written out by hand; its end is the model."""

import pytest
import torch
from torch import Tensor

from interp.analysis import logit_lens
from interp.engines.base import Request
from interp.errors import PointRefused, UserError
from tests.analysis.subjects import CAP, CLEAN, FAMILIES, other, own_logits, reader, subject
from tests.families.tiny import SPLIT_LLAMAS

NORM_AND_HEAD = {
    "gpt2": ("transformer.ln_f", "lm_head", lambda z: z),
    "llama": ("model.norm", "lm_head", lambda z: z),
    "gemma2": ("model.norm", "lm_head", lambda z: CAP * torch.tanh(z / CAP)),
    "granite": ("model.norm", "lm_head", lambda z: z / 8.0),
    "gpt_neox_parallel": ("gpt_neox.final_layer_norm", "lm_head", lambda z: z),
    "olmo2": ("model.norm", "lm_head", lambda z: z),
    "cohere2": ("model.norm", "lm_head", lambda z: z * 0.0625),
    "split_llama": ("norm", "lm_head", lambda z: z),
    "split_llama_mlp": ("norm", "lm_head", lambda z: z),
}


def by_hand(family: str, tokens: list[int]) -> Tensor:
    """[layers, pos, d_vocab]: hooks on the blocks, then the modules one after the other, an adapter first."""
    model, (norm, head, after) = subject(family), NORM_AND_HEAD[family]
    streams: list[Tensor] = []
    handles = [
        block.module.register_forward_hook(
            lambda m, args, output: streams.append(output if isinstance(output, Tensor) else output[0])
        )
        for block in model.anatomy.blocks
    ]
    own_logits(model, tokens)
    for handle in handles:
        handle.remove()
    norm, head = model.module.get_submodule(norm), model.module.get_submodule(head)
    with torch.no_grad(), model.numerics():
        if family in SPLIT_LLAMAS:
            streams[0] = model.module.adapter(streams[0])  # type: ignore[operator]
        return torch.stack([after(head(norm(stream)))[0] for stream in streams])


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_a_hand_written_loop(family: str) -> None:
    right = by_hand(family, CLEAN)
    lens = logit_lens(subject(family), CLEAN, top_k=4, return_logits=True)
    assert lens.logits is not None and lens.layers == (0, 1, 2) and lens.positions == tuple(range(7))
    assert (lens.logits - right).abs().max() <= 1e-12
    best = right.softmax(-1).sort(-1, descending=True)
    assert torch.equal(lens.token_ids, best.indices[..., :4])
    assert (lens.probabilities - best.values[..., :4]).abs().max() <= 1e-13
    assert (right[0] - right[2]).abs().max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_is_the_model(family: str) -> None:
    lens = logit_lens(subject(family), CLEAN, layers=[2], return_logits=True)
    assert lens.logits is not None
    assert (lens.logits[0] - own_logits(subject(family), CLEAN)).abs().max() <= 1e-12


def test_the_cap_is_named_and_applied() -> None:
    lens = logit_lens(subject("gemma2"), CLEAN, return_logits=True)
    assert lens.softcap == CAP and "after the cap of 30" in str(lens)
    assert lens.logits is not None and 0.8 * CAP < lens.logits.abs().max() < CAP
    plain = logit_lens(subject("llama"), CLEAN)
    assert plain.softcap is None and "cap" not in str(plain) and plain.logits is None


def test_each_layer_has_statistics_of_its_own() -> None:
    """The last layer's denominator in place of layer 0's gives other logits."""
    model = subject("gpt2")
    got = model.run([Request(CLEAN, capture=["resid_post.0", "final_norm_scale"])])[0].capture
    norm, head = (model.module.get_submodule(path) for path in ("transformer.ln_f", "lm_head"))
    x = got["resid_post.0"]
    borrowed = (x - x.mean(-1, keepdim=True)) / got["final_norm_scale"] * norm.weight + norm.bias  # type: ignore[operator]
    lens = logit_lens(model, CLEAN, layers=[0], return_logits=True)
    assert lens.logits is not None and (lens.logits[0] - head(borrowed)).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "split_llama_mlp"])
def test_other_points_layers_and_positions(family: str) -> None:
    model = subject(family)
    whole = logit_lens(model, CLEAN, return_logits=True)
    before = logit_lens(model, CLEAN, point="resid_pre", layers=[2, 1], positions=[-1, 0], return_logits=True)
    assert before.layers == (2, 1) and before.positions == (6, 0)
    assert whole.logits is not None and before.logits is not None
    assert torch.allclose(before.logits, whole.logits[[1, 0]][:, [6, 0]], rtol=0, atol=1e-13)
    with pytest.raises(PointRefused, match=r"resid_mid\.0 does not exist"):
        logit_lens(subject("gpt_neox_parallel"), CLEAN, point="resid_mid")


def test_several_streams_are_collapsed_as_the_model_does_it() -> None:
    model = other("hy_v4")
    lens = logit_lens(model, CLEAN, point="resid_streams", return_logits=True)
    assert lens.logits is not None and (lens.logits[-1] - own_logits(model, CLEAN)).abs().max() <= 1e-12


def test_it_reads_as_a_table_of_words() -> None:
    lens = logit_lens(reader(), "w1 w2 w3", top_k=2)
    assert lens.prompt == ("'<s>'", "'w1'", "'w2'", "'w3'")
    assert lens.texts[1][3][1] == repr(reader().tokenizer.decode([int(lens.token_ids[1, 3, 1])]))
    title, header, *rows = str(lens).splitlines()
    assert title.startswith("Most probable next token")
    assert header.split() == ["resid_post", "0", "'<s>'", "1", "'w1'", "2", "'w2'", "3", "'w3'"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert rows[2].split()[1:] == [
        word
        for text, p in zip(lens.texts[2], lens.probabilities[2], strict=True)
        for word in (text[0], f"{float(p[0]):.0%}")
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"point": "z"}, "d_model wide"),
        ({"point": "final_norm"}, "d_model wide"),
        ({"point": "resid_streams"}, "d_model wide"),
        ({"point": "no_such"}, "d_model wide"),
        ({"top_k": 0}, "top_k counts tokens"),
        ({"top_k": 132}, "top_k counts tokens"),
        ({"positions": [7]}, "Position 7 is outside"),
        ({"positions": []}, "at least one layer and one position"),
    ],
)
def test_what_cannot_be_asked(wrong: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        logit_lens(subject("llama"), CLEAN, **wrong)
    with pytest.raises(PointRefused, match="layers 0 to 2"):
        logit_lens(subject("llama"), CLEAN, layers=[3])
