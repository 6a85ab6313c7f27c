"""What a command sets up before its slow imports, how it ends, and the checks of where it writes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.cli import ProgressBar, check_output_file, check_output_folder, run
from settings.errors import UserError


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_openmp_threads_wait_without_spinning_unless_the_user_decides(monkeypatch, given, expected):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    found: list[str | None] = []
    assert run(lambda _: found.append(os.environ.get("OMP_WAIT_POLICY")), argparse.Namespace(quiet=False)) == 0
    assert found == [expected]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError(), 3, "error: out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            3,
            "out of memory",
        ),
        (OSError(errno.ENOSPC, "No space left", "a.pt"), 2, "a.pt: No space left; make room"),
        (PermissionError(errno.EACCES, "Permission denied", "a.pt"), 2, "a.pt: Permission denied; make room there or"),
    ],
)
def test_errors_that_users_can_mend_are_one_sentence_with_its_exit_code(error, code, said, capsys):
    def main(_: argparse.Namespace) -> int:
        raise error

    assert run(main, argparse.Namespace(quiet=False)) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "error"),
    [("SIGTERM", None), ("SIGHUP", None), ("SIGUSR1", None), ("SIGTERM", RecursionError("half of an import"))],
)
def test_a_signal_of_a_scheduler_is_said_and_ends_with_code_130_even_if_a_library_makes_it_an_error(
    name, error, capsys
):
    def main(_: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(5)
        except KeyboardInterrupt as interruption:
            raise error or interruption from None
        pytest.fail(f"{name} had no effect")

    kept = signal.signal(signal.Signals[name], lambda *_: None)  # in case the command does not handle it
    try:
        assert run(main, argparse.Namespace(quiet=False)) == 130
    finally:
        signal.signal(signal.Signals[name], kept)
    assert capsys.readouterr().err == f"interrupted by {name}; run the same command again\n"


def test_a_hangup_that_is_ignored_stays_so():
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    found = []
    try:
        assert run(lambda _: found.append(signal.getsignal(signal.SIGHUP)), argparse.Namespace(quiet=False)) == 0
    finally:
        signal.signal(signal.SIGHUP, kept)
    assert found == [signal.SIG_IGN]


LOGGED_BAR = """
import argparse, logging, sys, time, warnings
from runtime import cli

def main(_):
    cli.PLAIN_SECONDS = 0.2
    bar = cli.ProgressBar(range(20), desc="sampling", unit="step")
    for number in bar:
        time.sleep(0.05)
        bar.set_postfix_str(f"number {number}")
        warnings.warn("of a library")
        if number == 10:
            logging.getLogger("x").info("a message")
    warnings.warn("of a library")

sys.exit(cli.run(main, argparse.Namespace(quiet=False, log_file="logs/run.log")))
"""


def log_bar(folder: Path, rank: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-W", "always", "-c", LOGGED_BAR]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "RANK": rank}
    return subprocess.run(command, capture_output=True, cwd=folder, env=environment)


def test_a_log_file_gets_plain_lines_of_a_bar_and_each_foreign_warning_once(tmp_path):
    done = log_bar(tmp_path, rank="0")
    assert done.returncode == 0, done.stderr
    assert b"\r" not in done.stderr
    lines = done.stderr.decode().splitlines()
    assert "a message" in lines
    assert [line for line in lines if "of a library" in line] == ["<string>:11: UserWarning: of a library"]
    plain = [line for line in lines if re.fullmatch(r"sampling: \d+/20 step, number \d+, 00:0\d", line)]
    assert 2 <= len(plain) < 15, "a line now and then, not one for each of twenty steps"
    assert len(lines) == len(plain) + 2
    stamped = (tmp_path / "logs/run.log").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in stamped] == lines


def test_a_quiet_command_shows_no_bars():
    found = []
    for quiet in (True, False):
        run(lambda _: found.append(ProgressBar([]).disable), argparse.Namespace(quiet=quiet))
    assert found == [True, False]


def test_other_ranks_leave_progress_and_foreign_warnings_to_rank_zero(tmp_path):
    done = log_bar(tmp_path, rank="1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [(UserError("a: b; c; d"), 2, "error: a: b; c; d"), (ValueError("x"), None, "ValueError: x")],
)
def test_the_log_file_says_how_a_command_ended(tmp_path, error, code, last):
    def main(_: argparse.Namespace) -> int:
        raise error

    options = argparse.Namespace(quiet=True, log_file=str(tmp_path / "run.log"))
    with contextlib.nullcontext() if code else pytest.raises(ValueError, match="x"):
        assert run(main, options) == code
    assert (tmp_path / "run.log").read_text().splitlines()[-1].endswith(last)


@pytest.mark.parametrize("name", ["config.yaml", "."])
def test_a_log_file_that_is_the_config_or_no_file_is_refused(tmp_path, name, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("name: mine")
    options = argparse.Namespace(quiet=False, log_file=str(tmp_path / name), config=str(config))
    assert run(lambda _: pytest.fail("was run"), options) == 2
    assert config.read_text() == "name: mine"
    assert "error: --log-file: " in capsys.readouterr().err


def test_a_log_file_on_a_full_disk_is_said_once(capsys):
    def talk(_: argparse.Namespace) -> int:
        for _line in range(3):
            logging.getLogger("x").info("a line")
        return 0

    assert run(talk, argparse.Namespace(quiet=True, log_file="/dev/full")) == 0
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("check", "name", "sentence"),
    [
        (check_output_file, "", "--json: "),
        (check_output_file, "folder", "is not a file that can be overwritten"),
        (check_output_file, "file/deep/result.json", "file: Not a directory"),
        (check_output_file, "broken", "is not a file that can be overwritten"),
        (check_output_folder, "", "--out: the path is empty"),
        (check_output_folder, "broken", "broken: No such file"),
        (check_output_folder, "/proc/deep/out", "/proc: "),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(check, name, sentence, here):
    with pytest.raises(UserError) as caught:
        check(name)
    assert sentence in str(caught.value)
    assert name in str(caught.value)


def test_a_path_that_can_be_written_is_accepted_and_nothing_is_made(here):
    before = sorted(here.iterdir())
    for name in ("file", "new.json", "folder/new.json", "new/deep/new.json", str(here / "new.json"), "/dev/null"):
        check_output_file(name)
        check_output_file(Path(name))
    for name in (".", "folder", "new/deep", str(here)):
        check_output_folder(name)
        check_output_folder(Path(name))
    assert sorted(here.iterdir()) == before
    assert (here / "file").read_text() == "kept"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, which has a file, a folder and a link to nothing."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").symlink_to(tmp_path / "missing" / "target")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_output_never_replaces_an_input_nor_waits_for_a_pipe(tmp_path):
    config, pipe, link = tmp_path / "a.yaml", tmp_path / "pipe", tmp_path / "link.yaml"
    config.write_text("name: a\n")
    link.symlink_to(config)
    os.mkfifo(pipe)
    check_output_file(config, "--json")
    for path in (config, link, tmp_path / "." / "a.yaml"):
        with pytest.raises(UserError, match="is an input of this command"):
            check_output_file(path, "--write-config", [tmp_path / "absent", config])
    with pytest.raises(UserError, match="is not a file"):
        check_output_file(pipe, "--json")
