"""The first stream's terms: the embedding widened and scaled as the family does it; positions are the rest."""

import pytest
import torch
from torch import nn

from interp.engines.base import Request
from interp.models.anatomy import Linear, Start, Tap, Term
from interp.models.norms import Norm
from interp.models.start import start_terms
from interp.models.transforms import Scale
from tests.analysis.subjects import CLEAN, other

EMBEDDED, FIRST = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[10.0, 20.0, 30.0], [1.0, 2.0, 3.0]])
PLACE = Term("position", Tap("p", nn.Identity(), "output", None))


def test_a_factor_and_a_map_by_hand() -> None:
    wide = nn.Linear(2, 3)
    wide.weight.data, wide.bias.data = (
        torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        torch.tensor([0.5, 0.0, -0.5]),
    )
    token = Term("token", Tap("e", wide, "output", None, (Scale(2.0),)), Linear("e", wide, transposed=False))
    terms = dict(start_terms(Start((token, PLACE), None), EMBEDDED, FIRST))
    assert terms["token"].tolist() == [[3.0, 4.0, 5.0], [7.0, -2.0, 3.0]]
    assert torch.equal(terms["position"], FIRST - terms["token"])


def test_without_positions_or_through_a_norm_all_of_it_is_one_term() -> None:
    token = Term("token", Tap("e", nn.Identity(), "output", None))
    norm = Norm("n", nn.Identity(), centred=True, eps=1e-5, gain_offset=0.0)
    for start in (Start((token,), None), Start((token, PLACE), norm)):
        ((kind, value),) = start_terms(start, EMBEDDED, FIRST)
        assert kind == "token" and value is FIRST


def test_a_family_with_both() -> None:
    model = other("opt, projected embedding")
    got = model.run([Request(CLEAN, capture=["embeddings", "resid_pre.0"])])[0].capture
    start = model.anatomy.start
    assert isinstance(start, Start)
    token, position = (value for _, value in start_terms(start, got["embeddings"], got["resid_pre.0"]))
    decoder = model.module.model.decoder  # type: ignore[union-attr]
    with torch.no_grad():
        right = decoder.project_in(got["embeddings"])  # type: ignore[union-attr, operator]
    places = decoder.embed_positions.weight[2 : 2 + len(CLEAN)]  # type: ignore[union-attr, index]
    assert token.tolist() == [pytest.approx(row, abs=1e-14) for row in right.tolist()]
    assert (position - places).abs().max() <= 1e-14  # type: ignore[operator]
