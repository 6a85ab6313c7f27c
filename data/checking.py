"""Reads, measures and prepares each volume once, in parallel, and goes on where it was stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from data.formats import COPIES_WHILE_READING, channels_text, content_digest, read_header, read_stored, signature
from data.geometry import INTENSITY, geometry_of, in_planes, range_problem, scale_to_network
from data.header import FileError, Header, Note, Stored
from data.store import NUMBER, PAGE, ArrayFolder, StoredError
from runtime.cli import ProgressBar
from runtime.files import CHECKS, PREPARED, counted, exclusive_lock, printable, size_text
from runtime.host_memory import available_host_bytes
from settings import DataError
from settings.data import DataSettings

log = logging.getLogger(__name__)

MOST_THREADS = 8

# Part of the name of the file that holds results: change it whenever `VolumeFacts` changes.
VERSION = 5

# Part of the name of a folder of prepared volumes: change it whenever the same file and settings would be stored
# differently.
PREPARED_VERSION = 3

# Voxels converted at a time, so that ranking needs no second copy of the volume.
PART = 1 << 18

# Planes whose neighbouring voxels are compared.
MOST_PLANES = 16

# The share of equal neighbours. Label maps of 3 to 400 values reach 0.8 to 1; MR images 0.03 to 0.07 as they are, and
# at most 0.63 once they are enlarged four times and reduced to 32 grey levels.
LEAST_OF_LABELS = 0.7

# The settings that decide how a volume is prepared. Random crops and augmentation come after.
DECISIVE = {"spacing", "voxel_size", "resize", "intensity", "frame"}


@dataclass(frozen=True)
class VolumeFacts(Header):
    """What reading one whole file found, besides its header.

    `lower` and `upper` are the ends of each channel's intensity range, `low`, `median` and `high` the 1st, 50th and
    99th percentile of the first channel. `is_whole` says whether all values are whole numbers, `equal_neighbours`
    which share of neighbouring voxels is then equal, the lowest of all channels, else 0. `digest` is the hash of the
    file's bytes. `background` is the share of the first channel's voxels in the lowest tenth between `low` and `high`;
    NaN if it was not measured.
    """

    minimum: float
    maximum: float
    num_not_finite: int
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    low: float
    median: float
    high: float
    is_whole: bool
    equal_neighbours: float
    digest: str
    background: float = math.nan

    def to_json(self) -> dict[str, Any]:
        """Return the facts as `facts_from` takes them."""
        return asdict(self) | {"affine": self.affine.tolist()}


# Turns the dictionary that JSON gives back into facts; raises ValueError if it is damaged.
facts_from = TypeAdapter(VolumeFacts).validate_python


def looks_like_labels(facts: VolumeFacts) -> bool:
    """Return whether a volume has whole values, none negative, however many, in regions of equal ones."""
    return facts.is_whole and 0 <= facts.minimum < facts.maximum and facts.equal_neighbours >= LEAST_OF_LABELS


class Ranking:
    """The intensities of one channel in ascending order.

    `values` are the finite ones as float32, `count` is their number, `num_not_finite` that of the others. `is_whole`
    says whether all finite values are whole numbers.
    """

    def __init__(self, channel: Stored) -> None:
        # In memory order this is a view unless channels are interleaved.
        flat = channel.array.ravel(order="K")
        values = np.empty(flat.size, np.float32)
        self.is_whole = True
        for start in range(0, flat.size, PART):
            part = channel.values(flat[start : start + PART])
            values[start : start + PART] = part
            self.is_whole = self.is_whole and _is_whole(part)
        values.sort()
        # In float32, because another type would copy all values.
        infinity = np.float32(np.inf)
        first, last = np.searchsorted(values, -infinity, side="right"), np.searchsorted(values, infinity, side="left")
        self.values = values[first:last]
        self.count = len(self.values)
        self.num_not_finite = len(values) - self.count

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Return percentiles with linear interpolation."""
        # In place, because a copy would be another volume. Adding zero turns -0.0 into 0.0.
        found: list[float] = (np.percentile(self.values, percents, overwrite_input=True) + 0.0).tolist()
        return found

    def share_up_to(self, value: float) -> float:
        """Return the share of finite voxels up to this intensity."""
        return float(np.searchsorted(self.values, np.float32(value), side="right") / self.count)


def equal_neighbours(channel: Stored) -> float:
    """Return the share of neighbouring voxels that are equal, in some planes of a single-channel volume.

    Voxels of the lowest, the highest and the commonest value do not count, since images have background and clipped
    values. It is 1 if no other voxels are neighbours.
    """
    volume = channel.array[0]
    planes = volume[:, :, :: -(-volume.shape[2] // MOST_PLANES)]
    values, counts = np.unique(planes, return_counts=True)
    counts_too = ~np.isin(planes, [values[0], values[-1], values[counts.argmax()]])
    num_pairs = num_equal = 0
    for axis in (0, 1):
        voxels, wanted = np.moveaxis(planes, axis, 0), np.moveaxis(counts_too, axis, 0)
        is_pair = wanted[1:] & wanted[:-1]
        num_pairs += int(is_pair.sum())
        num_equal += int((is_pair & (voxels[1:] == voxels[:-1])).sum())
    return num_equal / num_pairs if num_pairs else 1.0


def _is_whole(values: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(((values == np.round(values)) | ~np.isfinite(values)).all())


def measure(path: Path, s: DataSettings, is_known: np.ndarray | None = None) -> tuple[Stored, VolumeFacts]:
    """Read one whole file and measure it; raise DataError, naming it, if it cannot be read.

    With `is_known`, bool on the file's grid, only the voxels where it is True are measured.
    """
    before = signature(path)
    stored, header = read_stored(path)
    digest = content_digest(path)
    if signature(path) != before:
        raise FileError(path, "it changed while it was read; run the same command again")
    if s.frame is not None and header.num_channels > 1:
        if s.frame >= header.num_channels:
            raise FileError(
                path,
                f"data.frame is {s.frame}, and it holds {header.num_channels} volumes "
                f"({' x '.join(map(str, header.axes))}); 0 to {header.num_channels - 1} is allowed; change it",
            )
        stored, header = stored.channel(s.frame), replace(header, num_channels=1)
    measured = stored if is_known is None else replace(stored, array=stored.array[:, is_known][:, :, None, None])
    channels = [Ranking(measured.channel(number)) for number in range(header.num_channels)]
    num_not_finite = sum(channel.num_not_finite for channel in channels)
    # A file with more channels than there are rules is refused later; until then its last ones go by the last rule.
    most = s.intensity.num_rules if s.intensity.num_rules > 1 else len(channels)
    percentiles, ranges = [], []
    for number, channel in enumerate(channels):
        mode, lower, upper = s.intensity.of_channel(min(number, most - 1))
        # One call for all of them, because each call may be a pass over the volume.
        asked = (0.0, 1.0, 50.0, 99.0, 100.0, *(() if mode == "window" else (lower, upper)))
        values = channel.percentiles(asked) if channel.count else [math.nan] * len(asked)
        percentiles.append(values)
        ends = (lower, upper) if mode == "window" else (values[5], values[6])
        ranges.append((0.0, 0.0) if num_not_finite else ends)
    is_whole = all(channel.is_whole for channel in channels) and not num_not_finite
    finite = [values for values, channel in zip(percentiles, channels, strict=True) if channel.count] or percentiles
    _, low, median, high, *_ = percentiles[0]
    facts = VolumeFacts(
        **vars(header),
        minimum=min(values[0] for values in finite),
        maximum=max(values[4] for values in finite),
        num_not_finite=num_not_finite,
        lower=tuple(lower for lower, _ in ranges),
        upper=tuple(upper for _, upper in ranges),
        low=low,
        median=median,
        high=high,
        is_whole=is_whole,
        equal_neighbours=min(equal_neighbours(measured.channel(n)) for n in range(len(channels))) if is_whole else 0.0,
        digest=digest,
        background=channels[0].share_up_to(0.9 * low + 0.1 * high) if channels[0].count else math.nan,
    )
    return stored, facts


def on_grid(stored: Stored, facts: VolumeFacts, s: DataSettings) -> np.ndarray:
    """Return a measured volume on the network's grid and in its range, as float32 (C, D, H, W)."""
    geometry = geometry_of(facts, s)
    oriented = geometry.oriented(stored.array)
    parts = (scale_to_network(stored.values(part), facts.lower, facts.upper) for part in in_planes(oriented))
    return geometry.to_network_grid(facts.num_channels, parts)


def unusable(facts: VolumeFacts, s: DataSettings, section: str = INTENSITY) -> str | None:
    """Return why a measured volume cannot be scaled, or None if it can; `section` has the rules of its intensities."""
    number = facts.num_not_finite
    if number:
        verb = "voxel is" if number == 1 else "voxels are"
        return f"{number:,} {verb} NaN or infinite; finite numbers are needed; replace them"
    rules = [s.intensity.of_channel(number) for number in range(s.intensity.num_rules)]
    for low, high in {(low, high) for mode, low, high in rules if mode == "window"}:
        if facts.maximum <= low or facts.minimum >= high:
            return (
                f"intensities {facts.minimum:g} to {facts.maximum:g} lie outside the window {low:g} to {high:g}; the "
                f"window must hold some of them; change {section}"
            )
    return range_problem(facts.lower, facts.upper, s.intensity, section)


def problems_of(path: Path, facts: VolumeFacts, s: DataSettings, in_channels: int) -> list[Note]:
    """Return what keeps a file that could be read from being used."""
    texts = [] if facts.num_channels == in_channels else [channels_text(facts, in_channels)]
    if (reason := unusable(facts, s)) is not None:
        texts.append(reason)
    if s.spacing is not None and not facts.has_spacing:
        texts.append("numpy arrays carry no voxel spacing, and data.spacing is set; convert it or set null")
    elif s.spacing is not None:
        spaced = geometry_of(facts, s).spaced_shape
        needed, free = 8.0 * facts.num_channels * math.prod(map(float, spaced)), available_host_bytes()
        if needed > free:
            texts.append(
                f"data.spacing makes it {' x '.join(map(str, spaced))} voxels, {needed / 2**30:.1f} GiB; "
                f"{free / 2**30:.1f} GiB of memory is free; choose a larger spacing"
            )
    return [Note(printable(path), text) for text in texts]


class PreparedFolder(ArrayFolder):
    """The prepared volumes of one way of preparing them, by the hash of the source's bytes."""

    def __init__(self, s: DataSettings) -> None:
        decisive = json.dumps([PREPARED_VERSION, s.model_dump(mode="json", include=DECISIVE)], sort_keys=True)
        super().__init__(PREPARED / hashlib.sha256(decisive.encode()).hexdigest()[:24])
        self.grid = tuple(s.voxel_size)

    def volume(self, digest: str, num_channels: int, is_checked: bool = False) -> tuple[np.ndarray, VolumeFacts]:
        """Return one prepared volume (float32, C, D, H, W) with what was measured in its source, as `read` does."""
        image, facts = self.read(digest, (num_channels, *self.grid), is_checked)
        return image, facts_from(facts)

    def has(self, facts: VolumeFacts) -> bool:
        """Return whether a volume is there and complete."""
        return self.find(facts.digest, (facts.num_channels, *self.grid), is_checked=False) is not None


@dataclass(frozen=True)
class Checked:
    """A file, its facts (None if it could not be read), and its problems."""

    path: Path
    facts: VolumeFacts | None
    problems: tuple[Note, ...]


def check_files(paths: Sequence[Path], s: DataSettings, in_channels: int) -> list[Checked]:
    """Check every file, prepare it if `data.prepared` is disk, and return the results in the order of `paths`.

    Only new and changed files, and those whose prepared volume is missing or damaged, are read. What was measured is
    kept in runs/checks. If several processes call this, one reads and the others wait for it.
    """
    common = os.path.commonpath([os.path.abspath(path) for path in paths])
    intensity = f"{s.intensity.mode} {s.intensity.lower!r} {s.intensity.upper!r} {s.frame}"
    key = hashlib.sha256(f"{VERSION}\n{common}\n{intensity}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
    results = CHECKS / f"{key}.jsonl"
    folder = PreparedFolder(s) if s.prepared == "disk" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive_lock(results.with_suffix(".lock")))
        measured, lines = _measured_before(results), None
        # Taken before reading, so that a file written meanwhile is read again next time.
        keys = {path: f"{os.path.abspath(path)}\n{signature(path)}" for path in paths}
        found: dict[Path, VolumeFacts | Note] = {}
        sizes: dict[Path, int] = {}
        if folder is not None:
            stack.enter_context(exclusive_lock(folder.folder / ".lock"))
        for path, key in keys.items():
            facts = measured.get(key)
            if facts is None or (folder and not problems_of(path, facts, s, in_channels) and not folder.has(facts)):
                sizes[path] = _num_bytes(path)
            else:
                found[path] = facts
        if folder is not None and any(sizes.values()):
            number = sum(map(bool, sizes.values()))
            needed = size_text(number * (PAGE + NUMBER.itemsize * in_channels * math.prod(s.voxel_size)))
            log.info("data: preparing %s once, %s in %s", counted(number, "volume"), needed, folder.folder)
        if sizes:
            try:
                lines = stack.enter_context(results.open("a", encoding="utf-8", buffering=1))
            except OSError as error:
                log.warning("data: %s cannot be written (%s); volumes will be read again next time", results, error)
        for path, result in _read_all(sizes, s, in_channels, folder):
            found[path] = result
            if isinstance(result, VolumeFacts) and lines is not None:
                lines.write(json.dumps([keys[path], result.to_json()]) + "\n")
    checked = []
    for path in paths:
        result = found[path]
        if isinstance(result, Note):
            checked.append(Checked(path, None, (result,)))
        else:
            checked.append(Checked(path, result, tuple(problems_of(path, result, s, in_channels))))
    return checked


def _measured_before(results: Path) -> dict[str, VolumeFacts]:
    """Return what was measured in each file, by its path and signature; a damaged line counts as not written."""
    measured = {}
    with contextlib.suppress(OSError):
        for line in results.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                key, values = json.loads(line)
                measured[str(key)] = facts_from(values)
    return measured


def _read_all(
    sizes: Mapping[Path, int], s: DataSettings, in_channels: int, folder: PreparedFolder | None
) -> Iterator[tuple[Path, VolumeFacts | Note]]:
    """Measure and prepare files in as many threads as the free memory allows; yield why some cannot be read."""

    def read(path: Path) -> tuple[Path, VolumeFacts | Note]:
        try:
            stored, facts = measure(path, s)
        except FileError as error:
            return path, error.note
        if folder is not None and not problems_of(path, facts, s, in_channels):
            with contextlib.suppress(StoredError):
                folder.volume(facts.digest, facts.num_channels, is_checked=True)
                return path, facts  # another file with the same content
            try:
                folder.write(facts.digest, on_grid(stored, facts, s), facts.to_json())
            except OSError as error:
                raise DataError(
                    f"{folder.folder}: the prepared volume of {printable(path)} cannot be written ({error.strerror}); "
                    "it needs a writable folder with free space; make room, or set data.prepared to memory or none"
                ) from error
        return path, facts

    grid_bytes = 4 * in_channels * math.prod(s.voxel_size)
    largest = COPIES_WHILE_READING * max(sizes.values(), default=0) + 2 * grid_bytes
    fitting = available_host_bytes() // largest
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


def _num_bytes(path: Path) -> int:
    """Return the size of a volume as float32 by its header; 0 if that cannot be read."""
    try:
        return read_header(path).num_bytes
    except DataError:
        return 0
