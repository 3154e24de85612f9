"""What holds for every test run: signatures are checked, skips fail the run, hypothesis is patient and repeatable."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import signatures

# Types and shapes in the package's signatures are checked here and nowhere else; it must come before the first import.
signatures.install("interp")

settings.register_profile("interp", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("interp")


@pytest.fixture
def unchecked_signatures() -> Iterator[None]:
    """For a test that hands over something wrong to see what a user, who has no such check, is told."""
    with signatures.unchecked():
        yield


UNPROVEN = ("skipped", "xfailed")


def _unproven(config: pytest.Config) -> int:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return sum(len(reporter.stats.get(outcome, ())) for outcome in UNPROVEN) if reporter else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that did not run proves nothing: the run ends with status 1 even if all others passed."""
    if _unproven(session.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say why the run failed."""
    if count := _unproven(config):
        terminalreporter.write_line(
            f"FAILED RUN: {count} skipped or expected to fail; `make setup` installs every model and package that the "
            "tests need, so repair the cause or remove the test.",
            red=True,
        )
