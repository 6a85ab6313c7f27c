"""Stop signals: a closed terminal counts as one, nohup keeps it away, and a second Ctrl-C ends the process at once."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios

from tests.conftest import ROOT

WAIT = """
import os, sys, time
from pathlib import Path
from training.loop import StopSignal

with StopSignal() as stop:
    Path("ready").touch()
    while not stop and not Path("enough").exists():
        time.sleep(0.01)
    print("as a progress bar writes", file=sys.stderr, flush=True)
    print("as a command prints", flush=True)
    Path("saved").write_text(str(stop.received))
    if len(sys.argv) > 1:
        os.kill(os.getpid(), 2)
        time.sleep(30)
"""


def started(folder, *arguments: str, **options) -> subprocess.Popen:
    (folder / "wait.py").write_text(WAIT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*arguments[:1], sys.executable, "wait.py", *arguments[1:]], cwd=folder, env=environment, **options
    )
    while not (folder / "ready").exists():
        assert process.poll() is None
    return process


def own_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_closed_terminal_asks_for_a_checkpoint_and_its_missing_output_does_no_harm(tmp_path):
    ours, theirs = pty.openpty()
    options = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = started(tmp_path, **options, start_new_session=True, preexec_fn=own_terminal)
    os.close(theirs)
    os.close(ours)
    assert process.wait(30) == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path):
    process = started(tmp_path, "nohup", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "enough").touch()
    assert process.wait(30) == 0
    assert (tmp_path / "saved").read_text() == "None"


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path):
    process = started(tmp_path, "env", "twice", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT
    assert (tmp_path / "saved").read_text() == "SIGINT"
