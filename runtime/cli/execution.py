"""Runs a command: sets up logging, prints user errors without a traceback, and returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from runtime.cli.arguments import overrides_of
from runtime.files import printable
from settings.errors import UserError
from settings.writing import dump_with_origins

OUT_OF_MEMORY = 3
INTERRUPTED = 130
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
}
# Errors about the path itself: a folder in place of a file or the reverse, a name too long, no permission.
PATH_ERRORS = {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EEXIST}


def run(main: Callable[[argparse.Namespace], int | None], options: argparse.Namespace) -> int:
    """Run a command and return its exit code; print errors that users can fix to standard error.

    Exit codes: 0 success, 2 wrong input, 3 out of memory, 130 interrupted.
    """
    _set_up_logging(options.quiet)
    # OpenMP reads this when torch is imported, which happens later. By default its idle threads spin, which takes time
    # from other processes on a shared CPU: steps took twice as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with _interruptible():
            if getattr(options, "print_config", False):
                print(dump_with_origins(options.config, overrides_of(options)), end="")
                return 0
            return main(options) or 0
    except UserError as error:
        return _report(error)
    except OSError as error:
        if error.errno in PATH_ERRORS and error.filename:
            return _report(UserError(f"{error.filename}: {error.strerror}; make it usable, or give another path"))
        if error.errno not in DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _report(UserError(f"{where}{DISK_ERRORS[error.errno]}; make room, then run the same command again"))
    except (MemoryError, RuntimeError) as error:
        # Compare the name of torch's error, because this module must not import torch.
        # On a CPU torch raises a plain RuntimeError.
        is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
        if not isinstance(error, MemoryError) and not is_torchs:
            raise
        print(f"{_red('error')}: out of memory; python scripts/oom_ladder.py shows what to change", file=sys.stderr)
        return OUT_OF_MEMORY
    except KeyboardInterrupt as error:
        print(
            "interrupted" if not error.args else f"interrupted by {error}; run the same command again", file=sys.stderr
        )
        return INTERRUPTED


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let a scheduler's signals stop a command as Ctrl-C does; while steps run, training has a handler of its own.

    A rank that waits for the others in native code could not act on a handler, so ranks end at once. A signal that is
    ignored, as nohup has SIGHUP, stays so.
    """
    received: list[str] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        raise KeyboardInterrupt(received[0])

    is_rank = "RANK" in os.environ
    numbers = [n for n in SCHEDULER_SIGNALS if not is_rank and signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except Exception as error:
        if received:  # an import that is interrupted may end in an error of the library
            raise KeyboardInterrupt(received[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(error: UserError) -> int:
    """Print an error unless another rank prints it, pass it on to torchrun, and return the exit code."""
    rank = os.environ.get("RANK", "0")
    is_ours = not error.is_reported_by_another_rank
    if error.is_reported_by_another_rank is None:
        # The ranks have not connected yet. Those on one machine fail in the same way, so the first one prints.
        is_ours = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_ours:
        who = f"process {rank}: " if rank != "0" else ""
        print(f"{_red('error')}: {who}{printable(error, keep=_LAYOUT)}", file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun shows the error with the earliest timestamp as the root cause.
        details = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": str(error), "extraInfo": details}}))
    return error.exit_code


_LAYOUT = "\n\t"
"""Control characters that our own messages use."""


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, which file names in messages may contain."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep=_LAYOUT)


class _LineHandler(logging.StreamHandler):
    """Gives each message a line of its own above the progress bars, instead of the end of a bar."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")  # only commands with bars import it
        # Forked workers share the lock of tqdm, and one that is killed would leave it locked.
        with contextlib.nullcontext() if bars is None else bars.tqdm.external_write_mode(self.stream, nolock=True):
            super().emit(record)


def _set_up_logging(quiet: bool) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may contain bytes that no encoding can represent; standard error escapes them by default.
        sys.stdout.reconfigure(errors="backslashreplace")
    is_rank_zero = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_rank_zero and not quiet else logging.WARNING
    handler = _LineHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # tqdm reads these when it is imported, which happens later.
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "10")  # seconds; a log file keeps every drawing of a bar


def _red(text: str) -> str:
    return f"\033[31m{text}\033[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else text
