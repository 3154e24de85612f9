"""The two packaged models in float32, each loaded and proven once for all tests; what `interp demo --quick` made."""

from functools import cache

import pytest

from interp.engines.eager import EagerEngine
from interp.engines.load import load_model
from tests.quick_demo import QuickDemo, run_quick_demo

GEMMA, SMOLLM = "gemma-3-270m", "smollm2-135m-instruct"


@cache
def loaded(name: str) -> EagerEngine:
    return load_model(name, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def gemma() -> EagerEngine:
    return loaded(GEMMA)


@pytest.fixture(scope="session")
def smollm() -> EagerEngine:
    return loaded(SMOLLM)


@pytest.fixture(scope="session", params=[GEMMA, SMOLLM])
def engine(request: pytest.FixtureRequest) -> EagerEngine:
    """Both, one after the other."""
    return loaded(request.param)


@pytest.fixture(scope="session")
def quick_demo() -> QuickDemo:
    return run_quick_demo()
