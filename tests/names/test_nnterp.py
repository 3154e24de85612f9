"""nnterp's accessors on the same weights: each is translated rightly, or refused."""

import pytest

from .comparison import compare
from .conftest import FAMILIES, Peer


@pytest.mark.parametrize("family", FAMILIES)
def test_every_accessor(family: str, nnterp: Peer) -> None:
    tensors = nnterp(family)
    assert len(tensors) >= 22
    found = compare("nnterp", family, tensors)
    assert not found.wrong and not found.refused


def test_the_comparison_notices_a_swap(nnterp: Peer) -> None:
    tensors = nnterp("gemma2")
    swapped = {"mlps_output[1]": tensors["mlps_output[2]"], "layers_input[1]": tensors["layers_output[1]"]}
    assert len(compare("nnterp", "gemma2", swapped).wrong) == 2
