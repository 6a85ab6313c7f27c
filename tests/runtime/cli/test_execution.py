"""What a command sets up before its slow imports."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from runtime.cli import run


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_openmp_threads_wait_without_spinning_unless_the_user_decides(monkeypatch, given, expected):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    found: list[str | None] = []
    assert run(lambda _: found.append(os.environ.get("OMP_WAIT_POLICY")), argparse.Namespace(quiet=False)) == 0
    assert found == [expected]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")]
)
def test_running_out_of_host_memory_ends_with_code_3(error, capsys):
    def main(_: argparse.Namespace) -> int:
        raise error

    assert run(main, argparse.Namespace(quiet=False)) == 3
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_of_a_scheduler_outside_of_training_is_said_and_ends_with_code_130(name, capsys):
    def main(_: argparse.Namespace) -> int:
        before = signal.getsignal(signal.Signals[name])
        os.kill(os.getpid(), signal.Signals[name])
        time.sleep(5)
        pytest.fail(f"{name} had no effect, handled by {before}")

    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    for number in kept:
        signal.signal(number, lambda *_: None)  # in case the command does not handle it
    try:
        assert run(main, argparse.Namespace(quiet=False)) == 130
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    assert capsys.readouterr().err == f"interrupted by {name}; run the same command again\n"


def test_a_signal_that_a_library_turns_into_an_error_is_still_a_signal(capsys):
    def main(_: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            raise RecursionError("half of an import") from None
        pytest.fail("SIGTERM had no effect")

    assert run(main, argparse.Namespace(quiet=False)) == 130
    assert capsys.readouterr().err == "interrupted by SIGTERM; run the same command again\n"


def test_a_hangup_that_is_ignored_stays_so():
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    found = []
    try:
        assert run(lambda _: found.append(signal.getsignal(signal.SIGHUP)), argparse.Namespace(quiet=False)) == 0
    finally:
        signal.signal(signal.SIGHUP, kept)
    assert found == [signal.SIG_IGN]


def test_a_rank_keeps_the_systems_handling_of_signals(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    found = []
    assert run(lambda _: found.append(signal.getsignal(signal.SIGTERM)), argparse.Namespace(quiet=False)) == 0
    assert found == [signal.getsignal(signal.SIGTERM)]


LOGGED_BAR = """
import argparse, logging, sys, time
from runtime.cli.execution import run

def main(_):
    from tqdm import tqdm
    for number in tqdm(range(20)):
        time.sleep(0.12)
        if number == 10:
            logging.getLogger("x").info("a message")

sys.exit(run(main, argparse.Namespace(quiet=False)))
"""


def test_a_bar_in_a_log_file_is_drawn_rarely_and_messages_have_lines_of_their_own():
    done = subprocess.run([sys.executable, "-c", LOGGED_BAR], capture_output=True, text=True, check=True)
    lines = [line.strip() for line in re.split("[\r\n]", done.stderr)]
    assert "a message" in lines
    assert sum("/20" in line for line in lines) <= 3
