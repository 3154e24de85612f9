"""Loading says what it chose, once, where a person sees it and where a program can silence it."""

import logging
import subprocess
import sys

from interp.engines import load

TELL = "from interp.engines.load import tell; tell('Running on cpu.'); tell('Again.')"


def test_what_was_chosen_is_seen_without_setting_logging_up() -> None:
    done = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
    assert done.stderr == "interp: Running on cpu.\ninterp: Again.\n" and not done.stdout


def test_a_program_with_its_own_logging_decides_for_itself() -> None:
    setup = "import logging; logging.basicConfig(level=logging.WARNING);"
    done = subprocess.run([sys.executable, "-c", setup + TELL], capture_output=True, text=True, check=True)
    assert not done.stderr and not done.stdout


def test_the_line_is_a_log_record(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="interp"):
        load.tell("Running on cpu.")
    assert [record.getMessage() for record in caplog.records] == ["Running on cpu."]
