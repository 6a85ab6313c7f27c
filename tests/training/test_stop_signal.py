"""Stop signals: a closed terminal counts as one, nohup keeps it away, and a second Ctrl-C ends the process at once."""

from __future__ import annotations

import os
import pty
import signal

import pytest

WAIT = """
import os, signal, sys, time
from pathlib import Path
from training.loop import StopSignal

how = sys.argv[1]
# As nohup has it, or not, because the tests may run under nohup themselves.
signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)
if how.startswith("/dev/"):
    os.setsid()
    terminal = os.open(how, os.O_RDWR)  # which becomes the session's
    for descriptor in range(3):
        os.dup2(terminal, descriptor)
with StopSignal() as stop:
    Path("ready").touch()
    while not stop and not Path("enough").exists():
        time.sleep(0.01)
    print("as a progress bar writes", file=sys.stderr, flush=True)
    print("as a command prints", flush=True)
    Path("saved").write_text(str(stop.received))
    if how == "twice":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
"""


@pytest.fixture
def start(warm, tmp_path):
    """Start a process that waits for a signal and then saves which it was."""
    (tmp_path / "wait.py").write_text(WAIT)

    def started(how):
        process = warm(tmp_path, str(tmp_path / "wait.py"), how, output=tmp_path / "output")
        while not (tmp_path / "ready").exists():
            assert process.exit_code is None, process.output
        return process

    return started


def test_a_closed_terminal_asks_for_a_checkpoint_and_its_missing_output_does_no_harm(start, tmp_path):
    ours, theirs = pty.openpty()
    process = start(os.ttyname(theirs))
    os.close(theirs)
    os.close(ours)
    assert process.wait(30) == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_under_nohup_a_closed_terminal_changes_nothing(start, tmp_path):
    process = start("nohup")
    process.send(signal.SIGHUP)
    (tmp_path / "enough").touch()
    assert process.wait(30) == 0
    assert (tmp_path / "saved").read_text() == "None"


def test_a_second_ctrl_c_ends_the_process_at_once(start, tmp_path):
    process = start("twice")
    process.send(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT
    assert (tmp_path / "saved").read_text() == "SIGINT"
