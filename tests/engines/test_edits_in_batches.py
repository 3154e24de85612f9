"""For every kind of edit: a prompt in a batch is as alone, a cached step as one full pass, and nothing stays behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.edits import (
    Ablate,
    Add,
    Call,
    Cap,
    Edit,
    Freeze,
    Patch,
    Project,
    Reconstruct,
    Replace,
    Scale,
    SetFeature,
    Swap,
    Tokens,
)
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from tests.families.loaded import F64, PROMPTS, engine, hook_count

FAMILIES = ["llama", "gpt2", "gemma3", "gpt_neox_parallel", "bloom", "mpt", "granite", "qwen3_moe", "split_llama_mlp"]
NEW, N_MAX = 5, 16


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Coder:
    """A transcoder with a path past its latents, from `d_in` channels to 48."""

    def __init__(self, d_in: int = 48) -> None:
        self.into, self.out, self.skip = (
            noise(48, 70, seed=3)[:d_in],
            noise(70, 48, seed=4),
            noise(48, 48, seed=5)[:d_in],
        )

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.into / 7).abs()

    def decode(self, z: Tensor, x: Tensor) -> Tensor:
        return (z @ self.out + x @ self.skip) / 9


CODER, V, W, ROWS = Coder(), noise(48), noise(48, seed=2), noise(N_MAX, 48, seed=6)
FROM_LAST = ("last_prompt", "generated")
EDITS: list[Callable[[int], Edit]] = [
    lambda early: Add("resid_post.1", V, 4.0, positions=FROM_LAST),
    lambda early: Scale("mlp_out.1", -2.0, positions="1:"),
    lambda early: Replace("attn_out_post.1", ROWS, positions=(0, "last_prompt")),
    lambda early: Project("resid_pre.1", V, positions=Tokens((99, 5, 40))),
    lambda early: Cap("resid_post.0", V[:early], 0.1, min=-0.1),
    lambda early: Swap("mlp_in.1", V, W),
    lambda early: Ablate("mlp_out_post.1", positions="prompt"),
    lambda early: Ablate("resid_post.1", "mean", positions="generated"),
    lambda early: Ablate("attn_out.0", "mean"),
    lambda early: Freeze("resid_post.0", ROWS[:, :early]),
    lambda early: Patch("mlp_in.2", ROWS, "2:"),
    lambda early: Call("mlp_out.0", torch.sin, positions=FROM_LAST),
    lambda early: SetFeature("resid_post.1", CODER, 3, value=2.0, positions=FROM_LAST),
    lambda early: SetFeature("mlp_in.1", CODER, 3, scale=-1.0, output="mlp_out.1"),
    lambda early: Reconstruct("mlp_in.1", "mlp_out.1", CODER, positions=FROM_LAST),
    lambda early: Reconstruct("resid_pre.0", "resid_post.1", Coder(early)),
]
"""By the width of the stream in layer 0."""


def close(found: Tensor, right: Tensor) -> bool:
    return bool((found - right).abs().max() <= 1e-11 * (1 + right.abs().max()))


def fitting(model: EagerEngine, prompt: list[int], edits: list[Edit], new: int) -> list[Edit]:
    """Those that act on the prompt: the others are refused, which is another test's fact."""
    kept = []
    for edit in edits:
        through = len(prompt) + max(new - 1, 0)
        start = edit.positions.spans[0][0] if edit.positions.spans and not edit.positions.names else 0
        tokens = edit.positions.tokens and new == 0 and not set(edit.positions.tokens) & set(prompt)
        if start < through and not tokens and model.support(edit.at).writable:
            kept.append(edit)
    return kept


@pytest.mark.parametrize("family", FAMILIES)
def test_each_edit_is_alone_as_in_a_batch_and_cached_as_uncached(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine(family)
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", None)
    capture = ["resid_pre.1", "mlp_out.1", "resid_post.2"]
    (clean,) = model.run([Request(PROMPTS[1], return_logits=True)])
    hooks = hook_count(model.module)
    requests = [
        Request(prompt, capture=capture, edits=[edit], max_new_tokens=NEW, return_logits=True)
        for prompt in PROMPTS
        for edit in fitting(model, prompt, [make(model.model.width(0)) for make in EDITS], NEW)
    ]
    assert len(requests) >= 36
    for request, result in zip(requests, model.run(requests), strict=True):
        (alone,) = model.run([request])
        assert alone.tokens == result.tokens, request.edits
        assert alone.logits is not None and result.logits is not None
        assert close(result.logits, alone.logits), request.edits
        assert all(close(result.capture[at], alone.capture[at]) for at in capture), request.edits
        # one full pass over all tokens but the last, the positions written as numbers
        ids = result.tokens[:-1]
        (edit,) = request.edits
        chosen = edit.positions.selected(0, len(ids), result.n_prompt, ids)
        at = [p for p, selected in enumerate(chosen) if selected]
        if edit.needs_mean:
            (before,) = model.run([Request(ids[: result.n_prompt], capture=[edit.at])])
            same: Edit = Ablate(edit.at, before.capture[edit.at].mean(0), positions=at)
        else:
            arguments: dict[str, Any] = {**edit.arguments(), "positions": at}
            same = type(edit)(**arguments)
        (full,) = model.run([Request(ids, capture=capture, edits=[same] if at else [], return_logits=True)])
        assert full.logits is not None
        assert close(result.logits, full.logits), edit
        assert all(close(result.capture[at], full.capture[at]) for at in capture), edit
    (again,) = model.run([Request(PROMPTS[1], return_logits=True)])
    assert torch.equal(again.logits, clean.logits) and hook_count(model.module) == hooks  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_edit_changes_the_logits(family: str) -> None:
    model = engine(family)
    (clean,) = model.run([Request(PROMPTS[1], return_logits=True)])
    edits = [make(model.model.width(0)) for make in EDITS]
    for edit in fitting(model, PROMPTS[1], [edit for edit in edits if edit.positions.names != ("generated",)], 0):
        (result,) = model.run([Request(PROMPTS[1], edits=[edit], return_logits=True)])
        assert (result.logits - clean.logits).abs().max() > 1e-4, edit  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_point_that_is_read_shows_the_edits_made_there(family: str) -> None:
    """The dictionary encodes what the model has at that point in this very pass; the error stays that of the output."""
    model, points = engine(family), ["mlp_in.1", "mlp_out.1"]
    add = Add("mlp_in.1", V)
    splice = Reconstruct("mlp_in.1", "mlp_out.1", CODER, positions=(1, 2))
    for edits in ([add, splice], [splice, add]):
        (result,) = model.run([Request(PROMPTS[0], capture=points, edits=edits)])
        x, y = result.capture["mlp_in.1"], result.capture["mlp_out.1"]
        assert close(y[1:], CODER.decode(CODER.encode(x), x)[1:])
    (plain,) = model.run([Request(PROMPTS[0], capture=points, edits=[add])])
    assert torch.equal(y[0], plain.capture["mlp_out.1"][0])
    kept = Reconstruct("mlp_in.1", "mlp_out.1", CODER, keep_error=True)
    (same,) = model.run([Request(PROMPTS[0], capture=points, edits=[add, kept])])
    assert close(same.capture["mlp_out.1"], plain.capture["mlp_out.1"])
    set_one = SetFeature("mlp_in.1", CODER, 3, delta=1.0, output="mlp_out.1")
    (moved,) = model.run([Request(PROMPTS[0], capture=points, edits=[add, set_one])])
    assert close(moved.capture["mlp_out.1"] - plain.capture["mlp_out.1"], (CODER.out[3] / 9).expand(3, -1))


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom", "split_llama"])
def test_a_patched_run_goes_on_as_the_run_it_was_patched_from(family: str) -> None:
    model, at = engine(family), "resid_post.1"
    other = [(t + 1) % 131 for t in PROMPTS[1]]
    source, plain = model.run([Request(other, capture=[at], return_logits=True), Request(PROMPTS[1], capture=[at])])
    request = Request(PROMPTS[1], edits=[Patch(at, source)], return_logits=True)
    assert close(model.run([request])[0].logits, source.logits)  # type: ignore[arg-type]
    (some,) = model.run([Request(PROMPTS[1], capture=[at], edits=[Patch(at, source, (2, "5:"))])])
    assert torch.equal(some.capture[at][[2, 5, 6]], source.capture[at][[2, 5, 6]])
    assert close(some.capture[at][[0, 1]], plain.capture[at][[0, 1]])


def test_the_mean_is_that_of_the_prompt_after_the_edits_before() -> None:
    model, at = engine("llama"), "resid_post.1"
    mean = Ablate(at, "mean", positions=("last_prompt", "generated"))
    requests = [Request(p, capture=[at], edits=[Add(at, V), mean, Scale(at, 2.0)], max_new_tokens=4) for p in PROMPTS]
    plain = model.run([Request(p, capture=[at]) for p in PROMPTS])
    for before, result in zip(plain, model.run(requests), strict=True):
        right = 2 * (before.capture[at] + V).mean(0)
        assert close(result.capture[at][result.n_prompt - 1 :], right.expand(len(result.tokens) - result.n_prompt, -1))


def test_one_head_is_edited_by_its_address() -> None:
    model, v = engine("llama"), noise(10)
    (clean,) = model.run([Request(PROMPTS[1], capture=["z.1"])])
    for edit in (Project("z.1.head-2", v), Ablate("z.1.head-2", "mean"), Patch("z.1.head-2", ROWS[:, :10])):
        (result,) = model.run([Request(PROMPTS[1], capture=["z.1"], edits=[edit])])
        others = [0, 1, 3, 4, 5]
        assert torch.equal(result.capture["z.1"][:, others], clean.capture["z.1"][:, others])
        assert (result.capture["z.1"][:, 2] - clean.capture["z.1"][:, 2]).abs().max() > 1e-6
