"""How commands behave around their work: signals, progress without a terminal."""

import signal
import subprocess
import sys

import pytest

from interp.scripts.console import WIDE, _Console, _Lines, console

WAITS = """
import signal, sys, time
from interp.scripts.console import finish
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run of tests in the background ignores it
def work(_):
    try:
        print("working", flush=True)
        time.sleep(60)
    finally:
        print("cleared", flush=True)
finish(work, None)
"""


def test_a_command_that_is_terminated_clears_up_like_one_that_is_interrupted() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "working\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130 and out == "cleared\n"
        assert err == "Interrupted; finished parts are kept.\n"


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys) -> None:
    lines = _Lines()
    lines("harvest", 1, 10, "tokens")
    lines.said -= lines.EVERY
    lines("harvest", 2048, 46763, "tokens")
    lines("harvest", 4096, 46763, "tokens")
    assert capsys.readouterr().out == "  harvest: 2,048 of 46,763 tokens\n"


def test_the_width_is_asked_anew_at_each_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `COLUMNS` was when the console was made; a pipe without it is wide."""
    for made_with in ("80", None):
        monkeypatch.delenv("COLUMNS", raising=False)
        if made_with:
            monkeypatch.setenv("COLUMNS", made_with)
        made = _Console(soft_wrap=True)
        for one in (made, console):
            monkeypatch.setenv("COLUMNS", "120")
            assert one.width == 120
            monkeypatch.delenv("COLUMNS", raising=False)
            assert one.width == WIDE
