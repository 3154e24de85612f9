"""`interp names` from its flags to its lines: translations, refusals, and the examples of docs/names.md."""

import re
import shlex
from pathlib import Path

import pytest

from .conftest import Interp

PAGE = Path(__file__).parents[2] / "docs" / "names.md"


def test_a_name_of_another_tool_on_a_model(interp: Interp, tiny: Path) -> None:
    outcome = interp("names", "blocks.1.hook_mlp_out", "--model", tiny, "--to", "interp")
    assert (outcome.status, outcome.out, outcome.err) == (0, "mlp_out_post.1\n", "")


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        ("transformer_lens", "blocks.1.mlp.hook_out"),
        ("nnsight", "model.layers[1].mlp.output"),
        ("nnterp", "mlps_output[1]"),
        ("hf", "model.layers.1.mlp output"),
        ("sparsify", "layers.1.mlp  (a transcoder of that name reads the module's input and predicts this output)"),
        ("dictionary_learning", "mlp_out_layer_1"),
        ("circuit_tracer", "blocks.1.mlp.hook_out"),
    ],
)
def test_our_address_in_another_tool(interp: Interp, tiny: Path, tool: str, line: str) -> None:
    outcome = interp("names", "mlp_out.1", "--model", tiny, "--to", tool)
    assert outcome.status == 0 and outcome.out.splitlines()[0] == line


def test_all_tools_at_once(interp: Interp, tiny: Path) -> None:
    outcome = interp("names", "model.layers.1.self_attn.o_proj input", "--model", tiny)
    assert outcome.status == 0 and not outcome.err
    assert outcome.out.startswith("model.layers.1.self_attn.o_proj input is z.1 on tiny, as a name of ")
    rows = {line.split("│")[1].strip(): line for line in outcome.out.splitlines() if line.count("│") > 3}
    assert "blocks.1.attn.hook_z" in rows["TransformerLens"] and "nearest" in rows["nnterp"]


def test_two_meanings_are_both_told_and_to_asks_whose_name_it_is(interp: Interp, tmp_path: Path) -> None:
    from tests.families.tiny import build
    from tests.training.conftest import tiny_tokenizer

    build("gpt2").save_pretrained(tmp_path / "gpt2")  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    name, model = "blocks.1.ln2.hook_normalized", tmp_path / "gpt2"
    outcome = interp("names", name, "--model", model)
    assert f"{name} is mlp_normalized.1 on gpt2, as a name of TransformerLens" in outcome.out
    assert f"{name} is mlp_in.1 on gpt2, as a name of TransformerLens 2.x, circuit-tracer" in outcome.out
    outcome = interp("names", name, "--model", model, "--to", "hf")
    assert outcome.status == 2 and "mlp_normalized.1 with --from transformer_lens; mlp_in.1 with" in outcome.err
    outcome = interp("names", name, "--model", model, "--to", "interp", "--from", "transformer_lens_legacy")
    assert outcome.status == 0 and outcome.out.startswith("mlp_in.1  (a LayerNorm of 2.x")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("blocks.1.mlp.hook_pre",), "it depends on whether the block has neurons or experts; name a model."),
        (("mlp_outt.3",), "No point is called 'mlp_outt'; nearest: mlp_out"),
        (("resid_post.3", "--to", "lens"), "No tool is called 'lens' here; known: interp, transformer_lens"),
        (("mlp_normalized.3", "--to", "nnterp"), "nnterp has no name that means mlp_normalized.3 on every family"),
        (("layers.3", "--from", "nnterp"), "no meaning that is known here as an accessor of nnterp"),
    ],
)
def test_a_refusal_is_one_sentence_and_status_2(interp: Interp, arguments: tuple[str, ...], sentence: str) -> None:
    outcome = interp("names", *arguments)
    assert outcome.status == 2 and not outcome.out
    assert sentence in outcome.err and outcome.err.count("\n") == 1


def test_a_point_that_the_model_lacks(interp: Interp, tiny: Path) -> None:
    for name in ("attn_gate.1", "resid_post.9", "blocks.9.hook_resid_post", "hidden_states[7]"):
        outcome = interp("names", name, "--model", tiny)
        assert outcome.status == 2 and ("tiny" in outcome.err or "layers 0 to 2" in outcome.err)


def test_the_examples_of_the_page(interp: Interp) -> None:
    block = re.findall(r"```\n(\$ interp names.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    examples = re.findall(r"\$ interp (.*)\n(.*)\n", block)
    assert len(examples) == 3
    for command, line in examples:
        outcome = interp(*shlex.split(command))
        assert (outcome.out + outcome.err).strip() == line
