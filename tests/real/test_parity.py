"""On real weights, twenty points at twenty layers are what TransformerLens' bridge has there."""

import pytest

from interp.engines.eager import EagerEngine

from .conftest import SMOLLM
from .parity import pairs, table

pytestmark = pytest.mark.real

BOUND = 1e-5
"""Of the tensor's largest entry: two implementations of attention in float32 round differently."""


def test_every_pair_agrees_with_the_bridge(engine: EagerEngine, capsys: pytest.CaptureFixture[str]) -> None:
    found = pairs(engine)
    with capsys.disabled():
        print(f"\n{table(engine, found)}")  # noqa: T201
    assert len({pair.address.name for pair in found}) == 20
    assert {pair.address.layer for pair in found} >= {0, engine.model.n_layers - 1}
    assert max(pair.difference for pair in found) <= BOUND


@pytest.mark.parametrize("engine", [SMOLLM], indirect=True)
def test_one_layer_off_is_noticed(engine: EagerEngine) -> None:
    """Even in the stream, whose largest entries are the same from layer to layer."""
    last = engine.model.n_layers - 1
    moved = [pair for pair in pairs(engine, shift=1) if pair.address.layer != last]
    assert len(moved) == 19 and min(pair.difference for pair in moved) > 50 * BOUND
