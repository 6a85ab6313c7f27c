"""Runs a command: sets up logging, prints user errors without a traceback, and returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from runtime.cli.arguments import check_output_file, overrides_of
from runtime.files import printable
from settings.errors import UserError
from settings.load import dump_with_origins

STEP_LINES = "steps"
"""The logger of plain lines about training steps, which a terminal leaves out because it shows a bar."""
OUT_OF_MEMORY = 3
INTERRUPTED = 130
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# The disk is full or read-only; a folder in place of a file or the reverse, a name too long, no permission.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
PATH_ERRORS = {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EEXIST}


def run(main: Callable[[argparse.Namespace], int | None], options: argparse.Namespace) -> int:
    """Run a command and return its exit code; print errors that users can fix to standard error.

    Exit codes: 0 success, 2 wrong input, 3 out of memory, 130 interrupted.
    """
    try:
        return _exit_code(main, options)
    except Exception:
        _to_log_file(traceback.format_exc().rstrip())
        raise


def _exit_code(main: Callable[[argparse.Namespace], int | None], options: argparse.Namespace) -> int:
    # OpenMP reads this when torch is imported, which happens later. By default its idle threads spin, which takes time
    # from other processes on a shared CPU: steps took twice as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with _interruptible():
            _set_up_logging(options.quiet, getattr(options, "log_file", None), getattr(options, "config", None))
            if getattr(options, "print_config", False):
                print(dump_with_origins(options.config, overrides_of(options)), end="")
                return 0
            return main(options) or 0
    except UserError as error:
        return _report(error)
    except OSError as error:
        if error.errno not in DISK_ERRORS and not (error.errno in PATH_ERRORS and error.filename):
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _report(UserError(f"{where}{error.strerror}; make room there or give another path, then run it again"))
    except (MemoryError, RuntimeError) as error:
        # Compare the name of torch's error, because this module must not import torch.
        # On a CPU torch raises a plain RuntimeError.
        is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
        if not isinstance(error, MemoryError) and not is_torchs:
            raise
        _say("error: out of memory; python scripts/oom_ladder.py shows what to change")
        return OUT_OF_MEMORY
    except KeyboardInterrupt as error:
        _say("interrupted" if not error.args else f"interrupted by {error}; run the same command again")
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
    """Print an error unless another rank prints it, and return the exit code."""
    rank = os.environ.get("RANK", "0")
    is_ours = not error.is_reported_by_another_rank
    if error.is_reported_by_another_rank is None:
        # The ranks have not connected yet. Those on one machine fail in the same way, so the first one prints.
        is_ours = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_ours:
        who = f"process {rank}: " if rank != "0" else ""
        _say(f"error: {who}{printable(error, keep=_LAYOUT)}")
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


class _LogFile(logging.FileHandler):
    """Says once that the file cannot be written, for example on a full disk, and lets the command go on without it."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        if not self.has_failed:
            print(f"warning: --log-file: {self.baseFilename} cannot be written ({sys.exc_info()[1]})", file=sys.stderr)
        self.has_failed = True

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is still in its buffer
            super().close()


def _set_up_logging(quiet: bool, log_file: str | None, config: str | None = None) -> None:
    """Send messages to standard error and to the log file; only rank zero sends more than its own warnings.

    The log file may not be the config, which it would be appended to.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may contain bytes that no encoding can represent; standard error escapes them by default.
        sys.stdout.reconfigure(errors="backslashreplace")
    is_rank_zero = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_rank_zero else logging.WARNING
    to_screen = _LineHandler(sys.stderr)
    to_screen.setLevel(logging.WARNING if quiet else level)
    to_screen.setFormatter(_PrintableFormatter("%(message)s"))
    if sys.stderr.isatty():
        to_screen.addFilter(lambda record: record.name != STEP_LINES)  # the bar shows them
    handlers: list[logging.Handler] = [to_screen]
    if log_file is not None and is_rank_zero:
        check_output_file(log_file, "--log-file", [] if config is None else [config])
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        to_file = _LogFile(log_file, encoding="utf-8", errors="backslashreplace")
        to_file.setFormatter(_PrintableFormatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        handlers.append(to_file)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    warnings.simplefilter("once", UserWarning)
    warnings.showwarning = _log_warning
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, which happens later


def _log_warning(message: Any, category: type, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    """Log the warning of a library without the line of its source; rank zero has the same libraries."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("py.warnings").warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)


def _say(text: str) -> None:
    """Print how the command ends to standard error, even if it is quiet, and add it to the log file."""
    print(text, file=sys.stderr)
    _to_log_file(text)


def _to_log_file(text: str) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, "%s", (text,), None))
