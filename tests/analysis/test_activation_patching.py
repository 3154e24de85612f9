"""A patch is what a hook written by hand does; all of one layer's stream brings back the clean answer exactly."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from interp.analysis import LogitDifference, activation_patching
from interp.engines.base import Request
from interp.errors import PointRefused, UserError
from interp.points import Address
from tests.analysis.subjects import CLEAN, CORRUPTED, FAMILIES, other, own_logits, reader, subject
from tests.families.loaded import hook_count

METRIC = LogitDifference(5, 99)


def measured(logits: Tensor) -> float:
    return float(logits[-1, 5] - logits[-1, 99])


@pytest.mark.parametrize("noising", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_stream_of_a_layer_carries_the_whole_answer(family: str, noising: bool) -> None:
    model = subject(family)
    found = activation_patching(model, CLEAN, CORRUPTED, "resid_post", METRIC, positions=[range(7)], noising=noising)
    assert found.clean == pytest.approx(measured(own_logits(model, CLEAN)), abs=1e-12)
    assert found.corrupted == pytest.approx(measured(own_logits(model, CORRUPTED)), abs=1e-12)
    assert abs(found.clean - found.corrupted) > 1e-3
    end = found.corrupted if noising else found.clean
    assert found.metric.shape == (3, 1) and (found.metric - end).abs().max() <= 1e-12
    assert (found.recovered - (0.0 if noising else 1.0)).abs().max() <= 1e-9
    assert (found.effect - (end - (found.clean if noising else found.corrupted))).abs().max() <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_flows_back_in_time_or_out_of_what_is_equal(family: str) -> None:
    """At the last layer only the last position counts; before the first difference there is nothing to patch."""
    found = activation_patching(subject(family), CLEAN, CORRUPTED, ["resid_post"], METRIC)
    assert found.metric.shape == (3, 7) and found.rows == tuple(Address("resid_post", layer) for layer in range(3))
    assert found.effect[2, :6].abs().max() <= 1e-12 and abs(float(found.recovered[2, 6]) - 1) <= 1e-9
    assert found.effect[:, 0].abs().max() <= 1e-12 and found.effect[0, 1].abs() > 1e-6


BY_HAND = [
    ("llama", "resid_post", 1, None, "model.layers.1", "output"),
    ("llama", "mlp_out", 0, None, "model.layers.0.mlp", "output"),
    ("llama", "z", 1, 4, "model.layers.1.self_attn.o_proj", "input"),
    ("gemma2", "attn_out_post", 2, None, "model.layers.2.post_attention_layernorm", "output"),
    ("gpt2", "mlp_in", 1, None, "transformer.h.1.mlp", "input"),
    ("gpt_neox_parallel", "attn_out", 1, None, "gpt_neox.layers.1.attention", "output"),
    ("split_llama", "mlp_out", 0, None, "layers_first.0.mlp", "output"),
    ("split_llama", "z", 0, 3, "layers_first.0.self_attn.o_proj", "input"),
    ("split_llama", "z", 2, 5, "layers_last.1.self_attn.o_proj", "input"),
    ("split_llama_mlp", "resid_pre", 1, None, "adapter", "output"),
]


@pytest.mark.parametrize(("family", "point", "layer", "head", "path", "side"), BY_HAND)
@pytest.mark.parametrize("noising", [False, True])
def test_a_cell_equals_a_hook_written_by_hand(
    family: str, point: str, layer: int, head: int | None, path: str, side: str, noising: bool
) -> None:
    positions = (4, 6)
    source, target = (CORRUPTED, CLEAN) if noising else (CLEAN, CORRUPTED)
    model = subject(family)
    d_head = 14 if family == "split_llama" and layer == 0 else 10
    channels = slice(None) if head is None else slice(head * d_head, (head + 1) * d_head)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.clone())
        return x

    def put(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, positions, channels] = kept[0][:, positions, channels]
        return x

    def run(tokens: list[int], change: Callable[[Tensor], Tensor]) -> Tensor:
        def after(m: Any, a: tuple, output: Any) -> Any:
            return change(output) if isinstance(output, Tensor) else (change(output[0]), *output[1:])

        def before(m: Any, a: tuple) -> Any:
            return (change(a[0]), *a[1:])

        module = model.module.get_submodule(path)
        handle = module.register_forward_hook(after) if side == "output" else module.register_forward_pre_hook(before)
        logits = own_logits(model, tokens)
        handle.remove()
        return logits

    run(source, keep)
    right = measured(run(target, put))
    hooks = hook_count(model.module)
    found = activation_patching(
        model, CLEAN, CORRUPTED, point, METRIC, positions=[positions], heads=head is not None, noising=noising
    )
    assert float(found.metric[layer, head or 0]) == pytest.approx(right, abs=1e-12)
    assert abs(right - (found.clean if noising else found.corrupted)) > 1e-6
    assert hook_count(model.module) == hooks


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox_parallel", "split_llama_mlp"])
def test_a_batch_of_patches_gives_what_each_gives_alone(family: str) -> None:
    model, points = subject(family), ["resid_pre", "mlp_out_post.1", "attn_in"]
    alone = activation_patching(model, CLEAN, CORRUPTED, points, METRIC, batch_size=1)
    assert alone.metric.shape == (7, 7)
    for batch_size in (5, 64):
        together = activation_patching(model, CLEAN, CORRUPTED, points, METRIC, batch_size=batch_size)
        assert (together.metric - alone.metric).abs().max() <= 1e-12
    backwards = activation_patching(model, CLEAN, CORRUPTED, points[::-1], METRIC, positions=[6, 3])
    assert (backwards["resid_pre"].metric - alone["resid_pre"].metric[:, [6, 3]]).abs().max() <= 1e-12
    assert backwards["mlp_out_post.1"].rows == (Address("mlp_out_post", 1),)


def test_heads_are_columns() -> None:
    found = activation_patching(subject("llama"), CLEAN, CORRUPTED, ["z", "value"], METRIC, heads=True)
    assert found.metric.shape == (6, 6) and found.columns == tuple(f"head {head}" for head in range(6))
    assert not found["z"].metric.isnan().any()
    assert found["value"].metric.isnan().any(0).tolist() == [False, False, True, True, True, True]
    both = activation_patching(subject("llama"), CLEAN, CORRUPTED, "z", METRIC, heads=True, positions=[6, [4, 5]])
    one = activation_patching(subject("llama"), CLEAN, CORRUPTED, "z.1.head-3", METRIC, positions=[[4, 5, 6]])
    assert float(both.metric[1, 3]) == pytest.approx(float(one.metric[0, 0]), abs=1e-12)
    assert len(found.largest(100)) == 18 + 6
    sizes = [abs(patch.effect) for patch in found.largest(100)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == found.effect.abs().nan_to_num().max()
    best = both.largest(1)[0]
    row, head = divmod(int(both.effect.abs().argmax()), 6)
    assert best.at == Address("z", row, head=head) and best.column == f"head {head}"
    assert (best.effect, best.recovered) == (float(both.effect[row, head]), float(both.recovered[row, head]))
    assert one.largest()[0].at == Address("z", 1, head=3) and one.largest()[0].column == "4 77 5 5 6 88"


def test_attention_patterns_are_patched_head_by_head_and_query_by_query() -> None:
    model = subject("llama")
    heads = activation_patching(model, CLEAN, CORRUPTED, "attn_probs", METRIC, heads=True)
    query = activation_patching(model, CLEAN, CORRUPTED, ["attn_probs.1.head-2"], METRIC, positions=[range(7), 6])
    assert heads.metric.shape == (3, 6) and query.metric.shape == (1, 2)
    assert float(heads.metric[1, 2]) == pytest.approx(float(query.metric[0, 0]), abs=1e-12)
    assert heads.effect.abs().max() > 1e-6 and abs(float(query.effect[0, 1])) > 1e-9


def test_any_number_of_the_logits_can_be_the_metric() -> None:
    found = activation_patching(
        subject("gpt2"), CLEAN, CORRUPTED, "resid_post.1", lambda logits: logits[-1].log_softmax(-1)[5]
    )
    right = own_logits(subject("gpt2"), CLEAN)[-1].log_softmax(-1)[5]
    assert found.clean == pytest.approx(float(right), abs=1e-12)


def test_layers_that_lack_the_point_have_no_row() -> None:
    found = activation_patching(other("jamba"), CLEAN, CORRUPTED, "z", METRIC, heads=True)
    assert found.rows == (Address("z", 1),)


def test_it_reads_as_a_table_of_shares() -> None:
    metric = LogitDifference("w4", "w5")
    found = activation_patching(reader(), "w1 w2 w3", "w1 w7 w3", "resid_post", metric)
    title, header, *rows = str(found).splitlines()
    assert title.startswith("Share recovered, clean into corrupted; metric: clean ")
    assert header.split() == ["patched", "at", "0", "'<s>'", "1", "'w1'", "2", "'w7'", "3", "'w3'"]
    assert rows[2].split() == ["resid_post.2", "+0.00", "+0.00", "+0.00", "+1.00"]
    (result,) = reader().run([Request("w1 w2 w3", return_logits=True)])
    assert result.logits is not None
    four, five = (reader().tokenizer.convert_tokens_to_ids(word) for word in ("w4", "w5"))
    assert found.clean == pytest.approx(float(result.logits[-1, four] - result.logits[-1, five]), abs=1e-12)


def test_progress_is_shown_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    activation_patching(subject("gpt2"), CLEAN, CORRUPTED, "resid_post.1", METRIC)
    assert capsys.readouterr() == ("", "")
    activation_patching(subject("gpt2"), CLEAN, CORRUPTED, "resid_post.1", METRIC, progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "activation patching" in shown.err


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"corrupted": [1, 2]}, UserError, "the clean prompt has 7 tokens and the corrupted one 2"),
        ({"corrupted": CLEAN}, UserError, "prompt are the same"),
        ({"metric": lambda logits: 1.5}, UserError, "1.5 on both prompts"),
        ({"positions": [7]}, UserError, "Position 7 is outside"),
        ({"positions": []}, UserError, "at least one position"),
        ({"positions": [[]]}, UserError, "at least one position"),
        ({"points": []}, UserError, "at least one point"),
        ({"points": "head_out"}, PointRefused, "head_out can be written in no layer: the value is computed inside"),
        ({"points": "resid_post.3"}, PointRefused, "layers 0 to 2"),
        ({"points": "logits"}, PointRefused, "cannot be patched"),
        ({"heads": True}, UserError, "heads are at z"),
        ({"points": "z.1.head-2", "heads": True}, UserError, "give z.1, not z.1.head-2"),
        ({"batch_size": 0}, UserError, "batch_size"),
        ({"metric": LogitDifference(5, 5)}, UserError, "one token"),
        ({"metric": LogitDifference(5, 99, position=7)}, UserError, "reads position 7"),
        ({"metric": LogitDifference(5, 131)}, UserError, "outside the vocabulary"),
        ({"metric": lambda logits: logits[-1]}, UserError, "one number"),
    ],
)
def test_what_cannot_be_asked(changed: dict, error: type[Exception], said: str) -> None:
    given = {"clean": CLEAN, "corrupted": CORRUPTED, "points": "resid_post", "metric": METRIC} | changed
    with pytest.raises(error, match=said):
        activation_patching(subject("llama"), **given)
