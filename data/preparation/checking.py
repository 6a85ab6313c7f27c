"""Checks and prepares every volume in one pass over the files, in parallel, and goes on where it was stopped."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from tqdm import tqdm

from data.formats import COPIES_WHILE_READING, channels_text, read_header, signature
from data.geometry import geometry_of
from data.intensity import INTENSITY
from data.preparation.records import Records, record_key
from data.preparation.store import PreparedError, PreparedFolder
from data.reading import VolumeFacts, measure, on_grid, unusable
from runtime.files.locking import exclusive_lock
from runtime.files.names import counted, printable, size_text
from settings import DataError
from settings.data import DataSettings

log = logging.getLogger(__name__)

MOST_THREADS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Checked:
    """A file, its facts (None if it could not be read), and its problems as text."""

    path: Path
    facts: VolumeFacts | None
    problems: tuple[str, ...]


def check_files(paths: Sequence[Path], s: DataSettings, in_channels: int, results_folder: Path) -> list[Checked]:
    """Check every file, prepare it if `data.prepared` is disk, and return the results in the order of `paths`.

    Only new and changed files, and those whose prepared volume is missing or damaged, are read. What was measured is
    kept in `results_folder`. If several processes call this, one reads and the others wait for it.
    """
    records = Records(results_folder, paths, s)
    folder = PreparedFolder(s) if s.prepared == "disk" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive_lock(records.lock))
        if folder is not None:
            stack.enter_context(exclusive_lock(folder.folder / ".lock"))
            folder.tidy()
        records.load()
        # Taken before reading, so that a file written meanwhile is read again next time.
        keys = {path: record_key(path) for path in paths}
        known = {path: facts for path in paths if (facts := records.get(keys[path])) is not None}
        good = [facts.digest for path, facts in known.items() if not any(problems_of(path, facts, s, in_channels))]
        lacking = {*good} - _intact(folder, good, in_channels) if folder is not None else set()
        # Those of other files; a folder that was moved needs no space.
        num_others = len(folder) - len({*good} - lacking) if folder is not None else 0
        new = [path for path in paths if path not in known or known[path].digest in lacking]
        errors = _read_all(new, s, in_channels, folder, num_others, lambda path, facts: records.add(keys[path], facts))
        records.tidy(list(keys.values()))
        checked = []
        for path in paths:
            facts = records.get(keys[path])
            if path in errors or facts is None:
                checked.append(Checked(path, None, (errors[path],)))
            else:
                checked.append(Checked(path, facts, tuple(problems_of(path, facts, s, in_channels))))
    return checked


def problems_of(path: Path, facts: VolumeFacts, s: DataSettings, in_channels: int) -> Iterator[str]:
    """Yield what keeps a file that could be read from being used."""
    where = printable(path)
    if facts.num_channels != in_channels:
        yield channels_text(path, facts.header, in_channels)
    reason = unusable(path, facts, s)
    if reason is not None:
        yield reason
    else:
        yield from outside_windows(path, facts, s)
    if s.spacing is not None and not facts.has_spacing:
        yield f"{where}: numpy arrays carry no voxel spacing, and data.spacing is set; convert it or set null"
    elif s.spacing is not None:
        spaced = geometry_of(facts.header, s).spaced_shape
        needed, free = 8.0 * facts.num_channels * math.prod(map(float, spaced)), psutil.virtual_memory().available
        if needed > free:
            yield (
                f"{where}: data.spacing makes it {' x '.join(map(str, spaced))} voxels, {needed / 2**30:.1f} GiB; "
                f"{free / 2**30:.1f} GiB of memory is free; choose a larger spacing"
            )


def outside_windows(path: Path, facts: VolumeFacts, s: DataSettings, section: str = INTENSITY) -> Iterator[str]:
    """Yield a line for each window that holds none of a file's intensities; `section` has the windows."""
    rules = [s.intensity.of_channel(number) for number in range(s.intensity.num_rules)]
    for low, high in {(low, high) for mode, low, high in rules if mode == "window"}:
        if facts.maximum <= low or facts.minimum >= high:
            yield (
                f"{printable(path)}: intensities {facts.minimum:g} to {facts.maximum:g} lie outside the window {low:g} "
                f"to {high:g}; the window must hold some of them; change {section}"
            )


def _intact(folder: PreparedFolder, digests: Sequence[str], num_channels: int) -> set[str]:
    """Return the volumes whose prepared files are complete; compare each file with its checksum once.

    A file that was right is not read again until it changes.
    """
    seals = folder.seals()

    def check(digest: str, is_sealed: bool) -> str | None:
        path = folder.path_of(digest)
        try:
            folder.read(digest, num_channels, is_checked=not is_sealed)
        except PreparedError as error:
            if os.path.lexists(path):
                log.warning("data: %s: %s; it is prepared anew", path, error)
            return None
        return digest

    everything = {digest: folder.path_of(digest) for digest in digests}
    sealed = {digest for digest, path in everything.items() if seals.get(path.name) == signature(path)}
    unsealed = sorted(digest for digest, path in everything.items() if digest not in sealed and os.path.lexists(path))
    num_threads = len(os.sched_getaffinity(0))
    right = {*_in_threads(lambda digest: check(digest, False), unsealed, num_threads, "checking prepared volumes")}
    if right - {None}:
        folder.seal({digest for digest in right if digest is not None})
    return {digest for digest in (*right, *(check(digest, True) for digest in sealed)) if digest is not None}


def _read_all(
    paths: Sequence[Path],
    s: DataSettings,
    in_channels: int,
    folder: PreparedFolder | None,
    num_others: int,
    add: Callable[[Path, VolumeFacts], None],
) -> dict[Path, str]:
    """Read files in as many threads as the free memory allows; return why some could not be read."""
    if not paths:
        return {}
    headers = {path: _num_bytes(path) for path in paths}
    if folder is not None:
        _require_space(folder, sum(1 for size in headers.values() if size), num_others, in_channels)

    def attempt(path: Path) -> tuple[Path, VolumeFacts | str]:
        try:
            stored, facts = measure(path, s)
        except DataError as error:
            return path, str(error)
        if folder is not None and not any(problems_of(path, facts, s, in_channels)):
            _keep(folder, path, facts, lambda: on_grid(stored, facts, s))
        return path, facts

    grid = 4 * in_channels * math.prod(s.voxel_size)
    largest = max(COPIES_WHILE_READING * size + 2 * grid for size in headers.values())
    fitting = psutil.virtual_memory().available // max(largest, 1)
    num_threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), fitting))
    errors, written = {}, set()
    title = "checking volumes" if folder is None else "preparing volumes"
    for path, result in _in_threads(attempt, paths, num_threads, title):
        if isinstance(result, str):
            errors[path] = result
        else:
            add(path, result)
            written.add(result.digest)
    if folder is not None:
        kept = {digest for digest in written if folder.path_of(digest).exists()}
        if kept:
            folder.seal(kept)
    return errors


def _keep(folder: PreparedFolder, path: Path, facts: VolumeFacts, image: Callable) -> None:
    with contextlib.suppress(PreparedError):
        folder.read(facts.digest, facts.num_channels, is_checked=True)
        return  # another file with the same content
    try:
        folder.write(image(), facts)
    except OSError as error:
        raise DataError(
            f"{folder.folder}: the prepared volume of {printable(path)} cannot be written ({error.strerror}); it needs "
            "a writable folder with free space; make room, or set data.prepared to memory or none"
        ) from error


def _require_space(folder: PreparedFolder, number: int, num_others: int, num_channels: int) -> None:
    """Say how much space the prepared volumes take; raise DataError if the disk does not have it.

    What is prepared of `num_others` other files may turn out to be what is needed, so it counts as space.
    """
    if not number:
        return
    needed = number * folder.num_bytes(num_channels)
    place = next(place for place in (folder.folder, *folder.folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if needed > free + num_others * folder.num_bytes(num_channels):
        raise DataError(
            f"data.prepared: disk: preparing {number} volumes needs {size_text(needed)} in {folder.folder}, "
            f"{size_text(free)} is free; make room, or set data.prepared to memory or none"
        )
    log.info(
        "data: preparing %s once, in %s (%s of %s free)",
        counted(number, "volume"),
        folder.folder,
        size_text(needed),
        size_text(free),
    )


def _in_threads(
    work: Callable[[Item], Result], items: Sequence[Item], num_threads: int, title: str
) -> Iterable[Result]:
    """Yield results as they come; an error or a signal stops what has not begun."""
    if not items:
        return
    pool = ThreadPoolExecutor(num_threads)
    try:
        done = as_completed([pool.submit(work, item) for item in items])
        for future in tqdm(done, total=len(items), desc=title, unit="volume", leave=False):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _num_bytes(path: Path) -> int:
    try:
        return read_header(path).num_bytes
    except DataError:
        return 0
