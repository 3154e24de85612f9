"""P7: a write at any point that the engine offers is one; writes that land elsewhere, or not at all, are found."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.engines import echo, hooks, local, writing
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.engines.writing import Place
from interp.models.anatomy import Anatomy, Tap
from interp.models.proofs import Claim, needed
from interp.models.tiny import tiny_model
from interp.models.transforms import Channels
from interp.points import POINTS, Address
from tests.families.loaded import engine, hook_count
from tests.families.tiny import N_LAYERS, SPLIT_LLAMAS
from tests.models.test_streams import unseen

FAMILIES = [
    "gpt2",
    "gpt_neox_parallel",
    "gemma2",
    "gemma3",
    "olmo2",
    "granite",
    "qwen3",
    "bloom",
    "mpt",
    "falcon",
    "opt",
    *SPLIT_LLAMAS,
]
TYPES = ["mixtral", "deepseek_v3", "glm4_moe", "llama4_text", "minimax", "mamba", "gpt_oss", "afmoe"]
"""Experts, latent attention, a norm that serves twice, a normed and weighed stream, no attention, sinks, a gate."""


@cache
def model_of(family: str) -> EagerEngine:
    return engine(family) if family in FAMILIES else wrap(tiny_model(family, torch.float64))


@cache
def echoed(family: str) -> list[Claim]:
    return echo.echo(model_of(family))


def offered(model: EagerEngine) -> set[Address]:
    return {address for address in needed(model.anatomy) if model.support(address).writable}


@pytest.mark.parametrize("family", FAMILIES + TYPES)
def test_every_writable_point_of_a_family_echoes(family: str) -> None:
    model = model_of(family)
    hooks_before = hook_count(model.module)
    claims = echoed(family)
    assert [claim for claim in claims if not claim.holds] == []
    assert {claim.proof for claim in claims} == {"P7"} and hook_count(model.module) == hooks_before
    read_back = {(c.points[0], c.layer) for c in claims if c.equation == f"{c.points[0]} reads back as written"}
    assert read_back == {(address.name, address.layer) for address in offered(model)}
    one_head = {
        (c.points[0], c.layer) for c in claims if c.equation == f"one head of {c.points[0]} reads back as written"
    }
    assert one_head == {(a.name, a.layer) for a in offered(model) if POINTS[a.name].has_heads}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_from_each_write_is_checked(family: str) -> None:
    """No writable point of these families is without an equation, or a function, that computes something from it."""
    model, claims = model_of(family), echoed(family)
    checked = {(c.points[0], c.layer) for c in claims if "written" in c.equation.partition(", with ")[2]}
    checked |= {(c.points[0], c.layer) for c in claims if " follows from " in c.equation}
    assert checked == {(address.name, address.layer) for address in offered(model)}


@pytest.mark.parametrize("kind", ["sandwich", "normed", "weighed"])
def test_an_architecture_that_nobody_has_seen_echoes(kind: str) -> None:
    model = unseen(kind)
    claims = echo.echo(model)
    assert claims and all(claim.holds for claim in claims)
    assert ("resid_mid" in {claim.points[0] for claim in claims}) == (kind == "sandwich")


def test_a_stream_moves_by_what_was_written_once() -> None:
    equations = {c.equation for c in echoed("llama") if c.layer == 1}
    for text in (
        "resid_mid + mlp_out_post = resid_post, with mlp_out_post written",
        "resid_mid + mlp_out_post = resid_post, with resid_mid written",
        "resid_pre + attn_out_post = resid_mid, but for what was written at resid_mid",
        "resid_post.l = resid_pre.(l+1), with resid_post written",
        "o_proj(z) = attn_out, with z written",
        "o_proj(z) = attn_out, with one head of z written",
        "act(mlp_pre) · mlp_pre_linear = mlp_act, with mlp_pre written",
        "attn_probs @ value = z, with value written",
        "query_rot follows from query as written",
        "W mlp_in + b = mlp_pre, with mlp_in written",
    ):
        assert text in equations, text


Fault = Callable[[Anatomy, Address, Tap], Place | Any]


def elsewhere(point: str, find: Callable[[Anatomy, Address, Tap], Tap]) -> Fault:
    """Writes at `point` go to another tap, reads are as they were."""

    def fault(anatomy: Anatomy, address: Address, tap: Tap) -> Place | Any:
        place = writing.place_of(anatomy, address, tap)
        return Place(find(anatomy, address, tap)) if address.name == point else place

    return fault


def raw_module(anatomy: Anatomy, address: Address, tap: Tap) -> Tap:
    return anatomy.tap(Address("mlp_out", address.layer))  # type: ignore[return-value]


def next_layer(anatomy: Anatomy, address: Address, tap: Tap) -> Tap:
    return anatomy.tap(replace(address, layer=((address.layer or 0) + 1) % N_LAYERS))  # type: ignore[return-value]


def at_the_norm(anatomy: Anatomy, address: Address, tap: Tap) -> Tap:
    """Where it is read: the norm sees it, and the skip path does not."""
    return tap


def heads_exchanged(anatomy: Anatomy, address: Address, tap: Tap) -> Tap:
    step = tap.steps[-1]
    assert isinstance(step, Channels)
    return replace(tap, steps=(*tap.steps[:-1], Channels(step.index.flip(0))))


def no_factor(anatomy: Anatomy, address: Address, tap: Tap) -> Tap:
    return replace(tap, steps=())


FAULTS = [
    ("gemma2", "mlp_out_post", raw_module, "mlp_out_post reads back as written"),
    ("llama", "mlp_act", next_layer, "mlp_act reads back as written"),
    ("llama", "z", heads_exchanged, "z reads back as written"),
    ("llama", "value", heads_exchanged, "one head of value reads back as written"),
    ("granite", "attn_out_post", no_factor, "attn_out_post reads back as written"),
    ("llama", "resid_mid", at_the_norm, "resid_mid + mlp_out_post = resid_post, with resid_mid written"),
]


def failed(model: EagerEngine) -> list[Claim]:
    bad = [claim for claim in echo.echo(model) if not claim.holds]
    assert all(claim.difference > 1e6 * claim.tolerance for claim in bad)
    return bad


@pytest.mark.parametrize(("family", "point", "find", "text"), FAULTS)
def test_a_write_that_lands_elsewhere_fails(
    family: str, point: str, find: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = elsewhere(point, find)
    monkeypatch.setattr(local, "place_of", fault)
    bad = failed(engine(family))
    assert text in {claim.equation for claim in bad} and {claim.points for claim in bad} == {(point,)}


def test_a_write_that_is_seen_but_not_passed_on_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture shows v, and the model goes on with b."""
    visit = hooks.Session._visit

    def forgetful(session: hooks.Session, use: hooks.Use, x: Tensor) -> Tensor | None:
        new = visit(session, use, x)
        return x if use.address.name in ("mlp_act", "query", "mlp_in", "embeddings", "lm_head") else new

    monkeypatch.setattr(hooks.Session, "_visit", forgetful)
    texts = {claim.equation for claim in failed(engine("llama"))}
    assert {
        "multiplier · down_proj(mlp_act) = mlp_out, with mlp_act written",
        "query_rot follows from query as written",
        "W mlp_in + b = mlp_pre, with mlp_in written",
        "scale and cap of lm_head = logits, with lm_head written",
    } <= texts
    assert any("with embeddings written" in text for text in texts)


def test_a_write_that_is_added_twice_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    visit = hooks.Session._visit

    def twice(session: hooks.Session, use: hooks.Use, x: Tensor) -> Tensor | None:
        new = visit(session, use, x)
        return new if new is None or use.address.name != "attn_out_post" else 2 * new - x

    monkeypatch.setattr(hooks.Session, "_visit", twice)
    texts = {claim.equation for claim in failed(engine("gpt2"))}
    assert "resid_pre + attn_out_post = resid_mid, with attn_out_post written" in texts


def test_a_write_that_leaks_upstream_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys come from one fused map here: a write at the one must leave the other."""
    write = Channels.write

    def leaking(step: Channels, x: Tensor, new: Tensor) -> Tensor:
        others = torch.ones(x.shape[-1], dtype=x.dtype)
        others[step.index.flatten()] = 0.0
        return write(step, x, new) + 1e-3 * others

    monkeypatch.setattr(Channels, "write", leaking)
    texts = {claim.equation for claim in failed(engine("gpt2"))}
    assert {f"W attn_in + b = {name}, beside what was written at query" for name in ("key", "value")} & texts


def test_it_takes_three_passes() -> None:
    model = engine("gemma3")
    passes: list[int] = []
    handle = model.module.get_submodule("model.embed_tokens").register_forward_hook(
        lambda m, a, y: passes.append(len(y))
    )
    echo.echo(model)
    handle.remove()
    assert len(passes) == 3
