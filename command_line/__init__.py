"""What every command has in common: its arguments, its exit codes and how errors are shown."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from settings.errors import UserError

INTERRUPTED = 130
OUT_OF_MEMORY = 3

DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
}


# A folder where a file should be, a file where a folder should be, a name that no disk takes, a door that is closed.
PATH_ERRORS = {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EEXIST}


def parser(description: str, examples: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every command takes; examples are shown by --help."""
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None
    result = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--quiet", action="store_true", help="warnings and errors only, no progress bars")
    return result


def add_config(target: argparse.ArgumentParser) -> None:
    """Add --config and the trailing overrides."""
    target.add_argument("--config", required=True, metavar="FILE", help="a preset, such as configs/high_res.yaml")
    target.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the config")


def add_training(target: argparse.ArgumentParser) -> None:
    """Add what both train scripts take besides the config."""
    target.add_argument("--dry-run", action="store_true", help="say what would be trained and what it needs, then stop")
    target.add_argument(
        "--on-oom",
        choices=("stop", "next-rung"),
        default="stop",
        help="out of memory: stop with a report, or go on with the next memory knob that keeps the mathematics",
    )


def at_least(smallest: float) -> Callable[[str], float]:
    """Return the reader of an argument that is a number of at least `smallest`, whole when `smallest` is."""
    kind = type(smallest)

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not smallest <= value < float("inf"):
            name = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {name} of at least {smallest:g}")
        return value

    return read


def above_zero(text: str) -> float:
    """Read an argument that is a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def check_output_file(path: str | Path, option: str = "--json") -> None:
    """Raise `UserError`, naming the option, unless a file can be written there; makes nothing."""
    if not str(path):
        raise UserError(f"{option}: the path is empty; give the name of a file")
    existing = _nearest_existing(path, option)
    if existing != Path(path):
        _check_takes_files(existing, path, option)
    elif existing.is_dir():
        raise UserError(f"{option}: {path} is a folder; a file is needed; add its name")
    elif not os.access(existing, os.W_OK):
        raise UserError(f"{option}: {path} cannot be overwritten; change its permissions, or give another name")


def check_output_folder(path: str | Path, option: str = "--out") -> None:
    """Raise `UserError`, naming the option, unless files can be written in that folder, there or not; makes nothing."""
    if not str(path):
        raise UserError(f"{option}: the path is empty; give the name of a folder")
    _check_takes_files(_nearest_existing(path, option), path, option)


def _nearest_existing(path: str | Path, option: str) -> Path:
    """Return the path itself, or the nearest of the folders above it that is there."""
    for candidate in (Path(path), *Path(path).absolute().parents):
        try:
            candidate.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UserError(f"{option}: {path} cannot be used ({error.strerror}); give another path") from None
        return candidate
    raise AssertionError(f"{path}: there is no root folder")


def _check_takes_files(folder: Path, path: str | Path, option: str) -> None:
    if not folder.is_dir():
        raise UserError(f"{option}: {path} cannot be written, {folder} is not a folder; give another path")
    try:
        # Tried, because permissions say nothing of read-only disks; on Linux this file never has a name.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be written, {folder} takes no files ({error.strerror}); give another path"
        ) from None


def run(main: Callable[[argparse.Namespace], int | None], options: argparse.Namespace) -> int:
    """Run a command and return its exit code; users' errors become text on standard error.

    0 done, 2 the input is wrong, 3 out of memory, 130 interrupted.
    """
    _set_up_logging(options.quiet)
    try:
        return main(options) or 0
    except UserError as error:
        return _report(error)
    except OSError as error:
        if error.errno in PATH_ERRORS and error.filename:
            return _report(UserError(f"{error.filename}: {error.strerror}; make way for it, or give another path"))
        if error.errno not in DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _report(UserError(f"{where}{DISK_ERRORS[error.errno]}; make room, then run the same command again"))
    except (MemoryError, RuntimeError) as error:
        # By name: this module does not import torch.
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        print(f"{_red('error')}: out of memory; python scripts/oom_ladder.py shows what to change", file=sys.stderr)
        return OUT_OF_MEMORY
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _report(error: UserError) -> int:
    """Print an error once for all processes that met it, tell torchrun, and return the exit code."""
    rank = os.environ.get("RANK", "0")
    # Before the processes have met, those of one machine find the same.
    is_ours = (
        os.environ.get("LOCAL_RANK", "0") == "0" if error.is_said_elsewhere is None else not error.is_said_elsewhere
    )
    if is_ours:
        who = f"process {rank}: " if rank != "0" else ""
        print(f"{_red('error')}: {who}{escaped(str(error))}", file=sys.stderr)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun prints this in its summary, as that of the process that failed first.
        details = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": str(error), "extraInfo": details}}))
    return error.exit_code


def escaped(text: str) -> str:
    """Return text whose control characters cannot move the cursor or colour the terminal: names of files hold any."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class _EscapingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def _set_up_logging(quiet: bool) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As standard error does: names of files may hold what no encoding has.
        sys.stdout.reconfigure(errors="backslashreplace")
    is_first = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_first and not quiet else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_EscapingFormatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    if quiet:
        # tqdm reads this when it is imported, which is later: settings load first.
        os.environ["TQDM_DISABLE"] = "1"


def _red(text: str) -> str:
    return f"\033[31m{text}\033[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else text
