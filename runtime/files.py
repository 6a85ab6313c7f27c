"""Where files are kept, and how they are read and written: atomically, under locks, with printable names."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


RUNS = Path(os.environ.get("LEAN3D_RUNS") or "runs")
PHANTOMS = RUNS / "phantoms"
"""Generated volumes."""
CHECKS = RUNS / "checks"
"""Results of checking volumes, so that unchanged files are not read again."""
PREPARED = RUNS / "prepared"
"""Volumes on the network's grid. All runs share them; the key of each subfolder covers everything they depend on."""
LATENTS = RUNS / "latents"
"""Encoded volumes. All runs share them; the key of each subfolder covers everything they depend on."""

SHARED_NAMES = ("phantoms", "checks", "latents", "prepared")
"""Names below runs/ that no run may have."""

STAGES = ("autoencoder", "ldm")

used_caches: set[Path] = set()
"""The subfolders of prepared and latents that this process has opened; a run records them for scripts/clean.py."""


class RunFolder:
    """The paths inside runs/<name>."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.previews = path / "previews"
        self.tensorboard = path / "tensorboard"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.evaluation = path / "evaluation.json"
        self.report = path / "report.html"
        self.caches = path / "caches.txt"

    def best_weights(self, stage: str) -> Path:
        """Return the path of a stage's weights at its best validation so far."""
        return self.path / f"{stage}_best.safetensors"

    def known_caches(self) -> set[str] | None:
        """Return the caches that the run has used, such as latents/3f0c; None if no readable record is there."""
        try:
            return set(read_text(self.caches).split())
        except OSError:
            return None

    def weights(self, stage: str) -> Path:
        """Return the path of a stage's finished weights."""
        return self.path / f"{stage}.safetensors"


def printable(text: object, keep: str = "") -> str:
    """Return text with unprintable characters escaped, except those in `keep`.

    A file name may hold line breaks, terminal codes and bytes that no encoding can represent.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in str(text))


def shortened(text: str, longest: int = 60) -> str:
    """Return text, cut to a number of characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 entry, 2 entries, 2 keys."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and not noun.endswith(("ay", "ey", "oy", "uy")):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in GiB, or in MiB if it is small."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.2f} MiB"


LARGEST_TEXT = 64 * 1024 * 1024


def check_regular(path: Path) -> int:
    """Return the size in bytes of a regular file that may be read, following links; raise `OSError` for anything else.

    Check before opening, because opening a FIFO blocks until it has a writer, and a device may never end. The libraries
    that read files later may call one that they may not read missing.
    """
    try:
        status = path.stat()
    except ValueError as error:  # a NUL in the path
        raise OSError(str(error)) from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError("a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    path.open("rb").close()
    return status.st_size


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """Return a text file without its byte order mark; raise `OSError` with the reason if it is not text."""
    size = check_regular(path)
    if size > largest:
        raise OSError(f"{size:,} bytes; the limit is {largest:,}")
    content = path.read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise OSError("UTF-16, not UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(f"byte {error.start} is not UTF-8") from None


def reason(error: OSError) -> str:
    """Return why a file could not be read, without its name, which the caller's message gives."""
    return error.strerror or str(error)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; after the block, flush that file to disk and rename it to `path`.

    If the block fails, remove the temporary file and leave `path` unchanged. The folder must exist. Several processes
    and threads may write the same path; the last one to finish wins.
    """
    with temporary_beside(path) as temporary:
        yield temporary
        put_in_place(temporary, path)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, and remove that file if the block fails.

    For files whose final name depends on their content: write one, then call `put_in_place` inside the block.
    """
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}.{os.getpid()}.tmp")
    try:
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Flush a written file to disk and rename it to `path` in the same folder; both survive a power cut."""
    _flush(temporary)
    os.replace(temporary, path)
    _flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file; readers see the old content or the new, never a part of it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold a lock file, waiting for it if necessary; the system releases it however the process ends.

    Where the file cannot be locked, for example on a read-only disk, warn and continue without a lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s: cannot be locked (%s); other processes may repeat the same work", lock, error)
        yield
