"""What all commands share: arguments, checks of output paths, exit codes, logging, errors, progress bars. No torch."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from tqdm import tqdm

from runtime.files import printable
from settings.errors import ConfigError, Problem, UserError
from settings.load import dump_with_origins

log = logging.getLogger(__name__)

STEP_LINES = "steps"
"""The logger of plain lines about training steps, which a terminal leaves out because it shows a bar."""
OUT_OF_MEMORY = 3
INTERRUPTED = 130
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# The disk is full or read-only; a folder in place of a file or the reverse, a name too long, no permission.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
PATH_ERRORS = {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EEXIST}

PLAIN_SECONDS = 30
"""A log file gets one line of a bar this often, and none of a bar that is done sooner."""

PLAIN_FORMAT = "{desc}: {n_fmt}/{total_fmt} {unit}{postfix}, {elapsed}"


def parser(description: str, examples: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every command takes; --help lists the examples."""
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None
    result = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--quiet", action="store_true", help="print only warnings and errors, and no progress bars")
    return result


def add_config(target: argparse.ArgumentParser) -> None:
    """Add --config and the overrides that follow it."""
    target.add_argument("--config", required=True, metavar="FILE", help="a config, such as configs/high_res.yaml")
    target.add_argument("overrides", nargs="*", metavar="section.key=value", help="override keys of the config")


def add_training(target: argparse.ArgumentParser, stage: str) -> None:
    """Add --config, the overrides and the other arguments that both train scripts take."""
    add_config(target)
    target.set_defaults(stage=stage)
    add = target.add_argument
    add("--dry-run", action="store_true", help="print what would be trained and the memory it needs, then stop")
    add("--print-config", action="store_true", help="print every setting and where its value comes from, then stop")
    add(
        "--gpu",
        metavar="NAME",
        help='with --dry-run: also predict for this GPU, such as "RTX 4090"; default without a GPU here: A100',
    )
    limit = target.add_mutually_exclusive_group()
    limit.add_argument(
        "--hours",
        type=above_zero,
        help="train for this long instead of max_steps; the learning rate decays over that time",
    )
    limit.add_argument("--minutes", type=above_zero, help="the same in minutes")
    add("--log-file", metavar="FILE", help="also append every message and a line per log_every here")
    add(
        "--on-oom",
        choices=("stop", "next-rung"),
        default="stop",
        help="when memory runs out: stop with a report (default), or continue with the next memory knob that leaves the"
        " mathematics unchanged",
    )


def overrides_of(options: argparse.Namespace) -> list[str]:
    """Return the overrides of a train script; --hours and --minutes override the stage's `max_hours`."""
    if options.gpu is not None and not options.dry_run:
        raise ConfigError([Problem("--gpu", "given without --dry-run", "allowed: with it", "leave it out to train")])
    hours = options.hours if options.minutes is None else options.minutes / 60
    return [*options.overrides, *([] if hours is None else [f"{options.stage}.training.max_hours={hours!r}"])]


def at_least(smallest: float) -> Callable[[str], float]:
    """Return a reader of numbers no smaller than `smallest`; it accepts only whole numbers if `smallest` is an int."""
    kind = type(smallest)

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if smallest <= kind(text) < float("inf"):
                return kind(text)
        name = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} is not a {name} of at least {smallest:g}")

    return read


def above_zero(text: str) -> float:
    """Read a finite number above zero."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")


RUN_OPTIONS: dict[str, dict[str, Any]] = {
    "--run": {"required": True, "metavar": "DIR", "help": "folder of a run, finished or not"},
    "--best": {"action": "store_true", "help": "use the weights of the best validation (default: the last weights)"},
    "--steps": {"type": at_least(1), "help": "steps from noise to latent (default: as configured)"},
    "--guidance-scale": {"type": at_least(0.0), "help": "values above 1 follow the conditions more closely"},
    "--seed": {"type": at_least(0), "default": 0, "help": "seed of the samples (default: 0)"},
    "--budget-gb": {
        "type": at_least(0.0),
        "help": "smaller batches and slabs if more memory than this is needed (default: the free memory)",
    },
}


def add_run_options(target: argparse.ArgumentParser, *names: str) -> None:
    """Add these of the options that several commands for trained runs take."""
    for name in names:
        target.add_argument(name, **RUN_OPTIONS[name])


def check_output_file(path: str | Path, option: str = "--json", inputs: Iterable[str | Path] = ()) -> None:
    """Raise `UserError`, naming the option, unless a file can be written to this path. Creates nothing.

    An output that would replace one of the command's `inputs` is refused.
    """
    target = Path(path)
    if not os.path.lexists(target):
        check_output_folder(path, option)
    elif not os.access(target, os.W_OK) or target.is_dir() or target.is_fifo():
        raise UserError(f"{option}: {path} is not a file that can be overwritten; give the name of a file")
    elif any(Path(source).exists() and target.samefile(source) for source in inputs):
        raise UserError(f"{option}: {path} is an input of this command and would be lost; give another name")


def check_output_folder(path: str | Path, option: str = "--out") -> None:
    """Raise `UserError`, naming the option, unless files can be written to this folder, which need not exist yet.

    Creates nothing.
    """
    if not str(path):
        raise UserError(f"{option}: the path is empty; give a name")
    folder = next(folder for folder in (Path(path), *Path(path).absolute().parents) if os.path.lexists(folder))
    try:
        # Permissions do not show that a disk is read-only, so try it. On Linux this file never gets a name.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written ({folder}: {error.strerror}); give another path") from None


def write_output(path: str | Path, text: str) -> None:
    """Write a text file, creating its folder. The path may be a device such as /dev/stdout."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


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
        # Forked workers share the lock of tqdm, and one that is killed would leave it locked.
        with tqdm.external_write_mode(self.stream, nolock=True):
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
    ProgressBar.is_quiet = quiet


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


class _Lines:
    """Takes what tqdm writes to a file, and logs it every half minute without carriage returns and padding."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def write(self, text: str) -> None:
        """Log the text unless it only clears the bar."""
        now = time.monotonic()
        if (words := text.strip()) and now - self._since >= PLAIN_SECONDS:
            self._since = now
            log.info("%s", words)

    def flush(self) -> None:
        """Do nothing: each line is written at once."""


class ProgressBar(tqdm):
    """tqdm's bar on a terminal; elsewhere a line every half minute, and nothing in a quiet command."""

    is_quiet: ClassVar[bool] = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        plain = {} if sys.stderr.isatty() else {"file": _Lines(), "bar_format": PLAIN_FORMAT}
        super().__init__(*arguments, **options | plain | ({"disable": True} if self.is_quiet else {}))
