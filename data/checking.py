"""Reads every volume once, reports its problems, and keeps the result until the file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from tqdm import tqdm

from data.formats import COPIES_WHILE_READING, channels_text, read_header, read_volume
from data.geometry import geometry_of
from data.intensity import flat_text, intensity_range
from data.readers import Header
from settings import DataError
from settings.data import DataSettings
from storage.atomic import write_text
from storage.locking import alone
from storage.names import printable

log = logging.getLogger(__name__)

# Part of the name of the file that holds results: change it whenever `VolumeFacts` changes.
VERSION = 2

MOST_THREADS = 8


@dataclass(frozen=True)
class VolumeFacts:
    """What reading one whole file found.

    `lower` and `upper` are the ends of each channel's intensity range; `digest` is the hash of the file's bytes.
    """

    axes: tuple[int, ...]
    shape: tuple[int, int, int]
    num_channels: int
    affine: tuple[tuple[float, ...], ...]
    dtype: str
    has_spacing: bool
    minimum: float
    maximum: float
    num_not_finite: int
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    digest: str

    @property
    def header(self) -> Header:
        """Return the header of the file."""
        affine = np.array(self.affine)
        return Header(self.shape, self.num_channels, affine, self.dtype, self.has_spacing, self.axes)


@dataclass(frozen=True)
class Checked:
    """A file, its facts (None if it could not be read), and its problems as text."""

    path: Path
    facts: VolumeFacts | None
    problems: tuple[str, ...]


def check_files(
    paths: Sequence[Path], s: DataSettings, in_channels: int, results_folder: Path, reread: bool = False
) -> list[Checked]:
    """Check every file and return the results in the order of `paths`.

    Only files that changed since the last check are read, or all with `reread`. Results are kept in `results_folder`.
    If several processes call this, one reads and the others wait for it.
    """
    results_file = results_folder / f"{_results_key(paths, s)}.json"
    with alone(results_file.with_suffix(".lock")):
        known = {} if reread else _load_results(results_file)
        # Taken before reading, so that a file written meanwhile is read again next time.
        signatures = [_signature(path) for path in paths]
        new = [path for path, signature in zip(paths, signatures, strict=True) if signature not in known]
        fresh = dict(zip(new, _read_all(new, s), strict=True))
        facts: list[VolumeFacts | DataError] = [
            fresh.get(path) or known[signature] for path, signature in zip(paths, signatures, strict=True)
        ]
        if new:
            # Keep the results of other files: another config may use another part of the same folder.
            mine = {os.path.abspath(path) for path in paths}
            others = {key: fact for key, fact in known.items() if key.rsplit(" ", 4)[0] not in mine}
            current = {key: fact for key, fact in zip(signatures, facts, strict=True) if isinstance(fact, VolumeFacts)}
            _save_results(results_file, others | current)
    return [
        Checked(path, None, (str(fact),))
        if isinstance(fact, DataError)
        else Checked(path, fact, tuple(_problems(path, fact, s, in_channels)))
        for path, fact in zip(paths, facts, strict=True)
    ]


def examine(path: Path, s: DataSettings) -> VolumeFacts:
    """Read one whole file; raise DataError, naming it, if it cannot be read."""
    voxels, header = read_volume(path)
    finite = np.isfinite(voxels)
    num_not_finite = int(voxels.size - np.count_nonzero(finite))
    if num_not_finite == voxels.size:
        minimum = maximum = float("nan")
    elif num_not_finite:
        minimum, maximum = float(voxels[finite].min()), float(voxels[finite].max())
    else:
        minimum, maximum = float(voxels.min()), float(voxels.max())
    del finite
    empty = ((0.0,) * len(voxels),) * 2
    lower, upper = empty if num_not_finite else intensity_range(voxels, s.intensity)
    affine = tuple(tuple(row) for row in header.affine.tolist())
    return VolumeFacts(
        axes=header.axes,
        shape=header.shape,
        num_channels=header.num_channels,
        affine=affine,
        dtype=header.dtype,
        has_spacing=header.has_spacing,
        minimum=minimum,
        maximum=maximum,
        num_not_finite=num_not_finite,
        lower=lower,
        upper=upper,
        digest=content_digest(path),
    )


def content_digest(path: Path) -> str:
    """Return the hash of a file's bytes, which identifies its volume; raise DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({error.strerror}); check the file") from error


def _problems(path: Path, facts: VolumeFacts, s: DataSettings, in_channels: int) -> Iterator[str]:
    where = printable(path)
    if facts.num_channels != in_channels:
        yield channels_text(path, facts.header, in_channels)
    if facts.num_not_finite:
        yield f"{where}: {facts.num_not_finite:,} voxels are NaN or infinite; finite numbers are needed; replace them"
    elif any(low >= high for low, high in zip(facts.lower, facts.upper, strict=True)):
        yield f"{where}: {flat_text(facts.lower, facts.upper, s.intensity)}"
    elif s.intensity.mode == "window" and (facts.maximum <= s.intensity.lower or facts.minimum >= s.intensity.upper):
        yield (
            f"{where}: intensities {facts.minimum:g} to {facts.maximum:g} lie outside the window "
            f"{s.intensity.lower:g} to {s.intensity.upper:g}; the window must hold some of them; change data.intensity"
        )
    if s.spacing is not None and not facts.has_spacing:
        yield f"{where}: numpy arrays carry no voxel spacing, and data.spacing is set; convert it or set null"
    elif s.spacing is not None:
        spaced = geometry_of(facts.header, s).spaced_shape
        needed, free = 8.0 * facts.num_channels * np.prod(np.array(spaced, float)), psutil.virtual_memory().available
        if needed > free:
            yield (
                f"{where}: data.spacing makes it {' x '.join(map(str, spaced))} voxels, {needed / 2**30:.1f} GiB; "
                f"{free / 2**30:.1f} GiB of memory is free; choose a larger spacing"
            )


def _read_all(paths: Sequence[Path], s: DataSettings) -> list[VolumeFacts | DataError]:
    """Read files in as many threads as the free memory allows; decompression and numpy release the GIL."""

    def attempt(path: Path) -> VolumeFacts | DataError:
        try:
            return examine(path, s)
        except DataError as error:
            return error

    if not paths:
        return []
    largest = max(map(_num_bytes, paths))
    fitting = psutil.virtual_memory().available // max(COPIES_WHILE_READING * largest, 1)
    num_threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), fitting))
    with ThreadPoolExecutor(num_threads) as pool:
        progress = tqdm(pool.map(attempt, paths), total=len(paths), desc="checking volumes", unit="volume", leave=False)
        return list(progress)


def _num_bytes(path: Path) -> int:
    try:
        return read_header(path).num_bytes
    except DataError:
        return 0


def _results_key(paths: Sequence[Path], s: DataSettings) -> str:
    folder = os.path.commonpath([os.path.abspath(path) for path in paths])
    intensity = f"{s.intensity.mode} {s.intensity.lower!r} {s.intensity.upper!r}"
    return hashlib.sha256(f"{VERSION}\n{folder}\n{intensity}".encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _signature(path: Path) -> str:
    """Return a text that changes whenever the file does, as far as that can be known without reading it.

    It includes ctime, which programs cannot set: ctime reveals new content even if size and mtime are the same.
    """
    try:
        status = path.stat()
    except OSError:
        return f"{os.path.abspath(path)} missing"
    return f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns} {status.st_ino} {status.st_ctime_ns}"


def _load_results(path: Path) -> dict[str, VolumeFacts]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {key: _facts_from(values) for key, values in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        # Results only save time: whatever is wrong with the file, the volumes can be read again.
        return {}


def _facts_from(values: dict) -> VolumeFacts:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    values["affine"] = tuple(tuple(row) for row in values["affine"])
    return VolumeFacts(**values)


def _save_results(path: Path, facts: dict[str, VolumeFacts]) -> None:
    try:
        write_text(path, json.dumps({key: asdict(fact) for key, fact in facts.items()}))
    except OSError as error:
        log.warning("data: %s cannot be written (%s); the volumes will be read again next time", path, error)
