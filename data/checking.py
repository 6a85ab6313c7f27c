"""Checks and prepares every volume in one pass over the files, in parallel, and goes on where it was stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from data.files.header import FileError, Note
from data.formats import COPIES_WHILE_READING, channels_text, read_header, signature
from data.geometry import geometry_of
from data.intensity import INTENSITY
from data.reading import VolumeFacts, facts_from, measure, on_grid, unusable
from data.store import PreparedFolder, StoredError
from runtime.cli.bars import ProgressBar
from runtime.files import CHECKS, counted, exclusive_lock, printable, size_text
from settings import DataError
from settings.data import DataSettings

log = logging.getLogger(__name__)

MOST_THREADS = 8

# Part of the name of the file that holds results: change it whenever `VolumeFacts` changes.
VERSION = 5


@dataclass(frozen=True)
class Checked:
    """A file, its facts (None if it could not be read), and its problems."""

    path: Path
    facts: VolumeFacts | None
    problems: tuple[Note, ...]


def check_files(
    paths: Sequence[Path], s: DataSettings, in_channels: int, results_folder: Path = CHECKS
) -> list[Checked]:
    """Check every file, prepare it if `data.prepared` is disk, and return the results in the order of `paths`.

    Only new and changed files, and those whose prepared volume is missing or damaged, are read. What was measured is
    kept in `results_folder`. If several processes call this, one reads and the others wait for it.
    """
    results = results_folder / f"{_results_key(paths, s)}.jsonl"
    folder = PreparedFolder(s) if s.prepared == "disk" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive_lock(results.with_suffix(".lock")))
        if folder is not None:
            stack.enter_context(exclusive_lock(folder.folder / ".lock"))
            folder.tidy()
        measured = _Measured(results)
        # Taken before reading, so that a file written meanwhile is read again next time.
        keys = {path: f"{os.path.abspath(path)}\n{signature(path)}" for path in paths}
        known = {path: measured.facts[key] for path, key in keys.items() if key in measured.facts}
        lacking: set[str] = set()
        num_others = 0
        if folder is not None:
            good = {f.digest for path, f in known.items() if not any(problems_of(path, f, s, in_channels))}
            intact = folder.intact(good, in_channels)
            lacking = good - intact
            # Those of other files; a folder that was moved needs no space.
            num_others = len(folder) - len(intact)
        new = [path for path in paths if path not in known or known[path].digest in lacking]
        sizes = {path: _num_bytes(path) for path in new}
        if folder is not None and any(sizes.values()):
            _require_space(folder, sum(map(bool, sizes.values())), num_others, in_channels)
        errors = {}
        for path, result in _read_all(sizes, s, in_channels, folder):
            if isinstance(result, Note):
                errors[path] = result
            else:
                measured.add(keys[path], result)
    checked = []
    for path in paths:
        if path in errors:
            checked.append(Checked(path, None, (errors[path],)))
        else:
            facts = measured.facts[keys[path]]
            checked.append(Checked(path, facts, tuple(problems_of(path, facts, s, in_channels))))
    return checked


class _Measured:
    """What was measured in each file, by its path and signature: a line of JSON, added as soon as it is measured."""

    def __init__(self, path: Path) -> None:
        self.facts: dict[str, VolumeFacts] = {}
        self._path: Path | None = path
        with contextlib.suppress(OSError):
            for line in path.read_bytes().splitlines():
                # A damaged line counts as not written.
                with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                    key, values = json.loads(line)
                    self.facts[str(key)] = facts_from(values)

    def add(self, key: str, facts: VolumeFacts) -> None:
        """Remember the facts of a file; call it from one thread."""
        self.facts[key] = facts
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, asdict(facts)]) + "\n")
        except OSError as error:
            log.warning("data: %s cannot be written (%s); the volumes will be read again next time", self._path, error)
            self._path = None


def _results_key(paths: Sequence[Path], s: DataSettings) -> str:
    folder = os.path.commonpath([os.path.abspath(path) for path in paths])
    intensity = f"{s.intensity.mode} {s.intensity.lower!r} {s.intensity.upper!r} {s.frame}"
    return hashlib.sha256(f"{VERSION}\n{folder}\n{intensity}".encode("utf-8", "surrogateescape")).hexdigest()[:24]


def problems_of(path: Path, facts: VolumeFacts, s: DataSettings, in_channels: int) -> Iterator[Note]:
    """Yield what keeps a file that could be read from being used."""
    texts = [] if facts.num_channels == in_channels else [channels_text(facts.header, in_channels)]
    reason = unusable(facts, s)
    texts += [reason] if reason is not None else outside_windows(facts, s)
    if s.spacing is not None and not facts.has_spacing:
        texts.append("numpy arrays carry no voxel spacing, and data.spacing is set; convert it or set null")
    elif s.spacing is not None:
        spaced = geometry_of(facts.header, s).spaced_shape
        needed, free = 8.0 * facts.num_channels * math.prod(map(float, spaced)), psutil.virtual_memory().available
        if needed > free:
            texts.append(
                f"data.spacing makes it {' x '.join(map(str, spaced))} voxels, {needed / 2**30:.1f} GiB; "
                f"{free / 2**30:.1f} GiB of memory is free; choose a larger spacing"
            )
    return (Note(printable(path), text) for text in texts)


def outside_windows(facts: VolumeFacts, s: DataSettings, section: str = INTENSITY) -> Iterator[str]:
    """Yield a text for each window that holds none of a volume's intensities; `section` has the windows."""
    rules = [s.intensity.of_channel(number) for number in range(s.intensity.num_rules)]
    for low, high in {(low, high) for mode, low, high in rules if mode == "window"}:
        if facts.maximum <= low or facts.minimum >= high:
            yield (
                f"intensities {facts.minimum:g} to {facts.maximum:g} lie outside the window {low:g} to {high:g}; the "
                f"window must hold some of them; change {section}"
            )


def _read_all(
    sizes: Mapping[Path, int], s: DataSettings, in_channels: int, folder: PreparedFolder | None
) -> Iterator[tuple[Path, VolumeFacts | Note]]:
    """Measure and prepare files in as many threads as the free memory allows; yield why some cannot be read."""

    def read(path: Path) -> tuple[Path, VolumeFacts | Note]:
        try:
            stored, facts = measure(path, s)
        except FileError as error:
            return path, error.note
        if folder is not None and not any(problems_of(path, facts, s, in_channels)):
            with contextlib.suppress(StoredError):
                folder.volume(facts.digest, facts.num_channels, is_checked=True)
                return path, facts  # another file with the same content
            try:
                folder.keep(on_grid(stored, facts, s), facts)
            except OSError as error:
                raise DataError(
                    f"{folder.folder}: the prepared volume of {printable(path)} cannot be written ({error.strerror}); "
                    "it needs a writable folder with free space; make room, or set data.prepared to memory or none"
                ) from error
        return path, facts

    grid_bytes = 4 * in_channels * math.prod(s.voxel_size)
    largest = COPIES_WHILE_READING * max(sizes.values(), default=0) + 2 * grid_bytes
    fitting = psutil.virtual_memory().available // largest
    num_threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), fitting))
    title = "checking volumes" if folder is None else "preparing volumes"
    pool = ThreadPoolExecutor(num_threads)
    try:
        done = as_completed([pool.submit(read, path) for path in sizes])
        for future in ProgressBar(done, total=len(sizes), desc=title, unit="volume", leave=False) if sizes else ():
            yield future.result()
    finally:
        # An error or a signal stops what has not begun.
        pool.shutdown(cancel_futures=True)


def _require_space(folder: PreparedFolder, number: int, num_others: int, num_channels: int) -> None:
    """Say how much space the prepared volumes take; raise DataError if the disk does not have it.

    What is prepared of `num_others` other files may turn out to be what is needed, so it counts as space.
    """
    needed = number * folder.num_bytes(num_channels)
    place = next(place for place in (folder.folder, *folder.folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if needed > free + num_others * folder.num_bytes(num_channels):
        raise DataError(
            f"data.prepared: disk: preparing {number} volumes needs {size_text(needed)} in {folder.folder}, "
            f"{size_text(free)} is free; make room, or set data.prepared to memory or none"
        )
    sizes = f"{size_text(needed)} of {size_text(free)} free"
    log.info("data: preparing %s once, in %s (%s)", counted(number, "volume"), folder.folder, sizes)


def _num_bytes(path: Path) -> int:
    """Return the size of a volume as float32 by its header; 0 if that cannot be read."""
    try:
        return read_header(path).num_bytes
    except DataError:
        return 0
