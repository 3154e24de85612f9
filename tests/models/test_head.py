"""What stands between the last block and the logits: more than a norm and a matrix in some families."""

import pytest
import torch
from torch import nn

from interp.engines.base import Request
from interp.engines.doctor import prove, refuse_unproven
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.models.anatomy import Head, Linear
from interp.models.norms import Norm
from interp.models.tiny import tiny_model
from interp.models.transforms import Scale

TOKENS = [5, 9, 120, 33]
SCALED, PROJECTED, NETWORK = "minicpm3", "opt, projected embedding", "modernbert-decoder"


def engine_of(family: str) -> EagerEngine:
    engine = wrap(tiny_model(family), name=family, prove=False)
    refuse_unproven(engine)
    return engine


def kinds(engine: EagerEngine) -> list[type]:
    assert isinstance(engine.anatomy.head, Head)
    return [type(step) for step in engine.anatomy.head.before]


def test_the_steps_before_the_unembedding_are_the_family_s_own() -> None:
    assert kinds(engine_of(SCALED)) == [Scale]
    assert kinds(engine_of(PROJECTED)) == [Linear]
    linear, activation, norm = kinds(engine_of(NETWORK))
    assert (linear, norm) == (Linear, Norm) and issubclass(activation, nn.Module)


@pytest.mark.parametrize("family", [SCALED, PROJECTED, NETWORK])
def test_the_head_closes(family: str) -> None:
    engine = engine_of(family)
    last = f"resid_post.{engine.model.n_layers - 1}"
    result = engine.run([Request(TOKENS, capture=[last, "final_norm", "lm_head"], return_logits=True)])[0]
    assert result.logits is not None
    assert (engine.unembed(result.capture[last]) - result.logits).abs().max() < 1e-13
    assert engine.model.d_model == result.capture[last].shape[-1] == result.capture["final_norm"].shape[-1]
    assert result.capture["lm_head"].shape[-1] == engine.model.d_vocab


@pytest.mark.parametrize("family", [SCALED, PROJECTED, NETWORK])
def test_a_step_left_out_fails(family: str) -> None:
    engine = wrap(tiny_model(family), name=family, prove=False)
    head = engine.anatomy.head
    assert isinstance(head, Head)
    assert all(claim.holds for claim in prove(engine) if claim.proof == "P4")
    square = tuple(step for step in head.before if isinstance(step, Linear))
    wrong = Head(head.linear, head.scale, head.cap, square if family == NETWORK else (Scale(0.5), *square))
    object.__setattr__(engine.anatomy, "head", wrong)
    assert not any(claim.holds for claim in prove(engine) if claim.proof == "P4")


def test_a_projection_widens_the_embedding_to_the_stream() -> None:
    engine = engine_of(PROJECTED)
    got = engine.run([Request(TOKENS, capture=["embeddings", "resid_pre.0"])])[0].capture
    assert got["embeddings"].shape[-1] == 32 and got["resid_pre.0"].shape[-1] == 48
    decoder = engine.module.model.decoder  # type: ignore[union-attr]
    positions = decoder.embed_positions.weight[2 : 2 + len(TOKENS)]  # type: ignore[union-attr]
    with torch.no_grad():
        right = decoder.project_in(got["embeddings"]) + positions  # type: ignore[union-attr, operator]
    assert (got["resid_pre.0"] - right).abs().max() < 1e-14
