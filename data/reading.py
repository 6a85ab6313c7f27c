"""Reads one volume: measures its intensities, and brings it to the network's grid and range."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter

from data.files.header import FileError, Header, Stored
from data.formats import content_digest, read_stored, signature
from data.geometry import geometry_of, in_planes
from data.intensity import INTENSITY, Ranking, equal_neighbours, flat_text, scale_to_network, unscalable_text
from settings.data import DataSettings

_Four = Field(min_length=4, max_length=4)


@dataclass(frozen=True)
class VolumeFacts:
    """What reading one whole file found.

    `lower` and `upper` are the ends of each channel's intensity range, `low`, `median` and `high` the 1st, 50th and
    99th percentile of the first channel. `is_whole` says whether all values are whole numbers, `equal_neighbours`
    which share of neighbouring voxels is then equal, the lowest of all channels, else 0. `digest` is the hash of the
    file's bytes. `background` is the share of the first channel's voxels in the lowest tenth between `low` and `high`;
    NaN if it was not measured.
    """

    axes: tuple[int, ...]
    shape: tuple[int, int, int]
    num_channels: int
    affine: Annotated[tuple[Annotated[tuple[float, ...], _Four], ...], _Four]
    dtype: Annotated[str, AfterValidator(lambda name: np.dtype(name).str)]
    has_spacing: bool
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
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    background: float = math.nan

    @property
    def header(self) -> Header:
        """Return the header of the file."""
        affine = np.array(self.affine)
        return Header(self.shape, self.num_channels, affine, self.dtype, self.has_spacing, self.axes)


_FACTS = TypeAdapter(VolumeFacts)


def facts_from(values: Any) -> VolumeFacts:
    """Return facts from the dictionary that JSON gives back; raise ValueError or TypeError if they are damaged."""
    facts = _FACTS.validate_python(values)
    if not len(facts.lower) == len(facts.upper) == facts.num_channels:
        raise ValueError("another number of channels")
    return facts


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
    counted = [values for values, channel in zip(percentiles, channels, strict=True) if channel.count] or percentiles
    _, low, median, high, *_ = percentiles[0]
    facts = VolumeFacts(
        axes=header.axes,
        shape=header.shape,
        num_channels=header.num_channels,
        affine=tuple(tuple(row) for row in header.affine.tolist()),
        dtype=header.dtype,
        has_spacing=header.has_spacing,
        minimum=min(values[0] for values in counted),
        maximum=max(values[4] for values in counted),
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
    geometry = geometry_of(facts.header, s)
    oriented = geometry.oriented(stored.array)
    parts = (scale_to_network(stored.values(part), facts.lower, facts.upper) for part in in_planes(oriented))
    return geometry.to_network_grid(facts.num_channels, parts)


def unusable(facts: VolumeFacts, s: DataSettings, section: str = INTENSITY) -> str | None:
    """Return why a measured volume cannot be scaled, or None if it can; `section` has the rules of its intensities."""
    number = facts.num_not_finite
    if number:
        verb = "voxel is" if number == 1 else "voxels are"
        return f"{number:,} {verb} NaN or infinite; finite numbers are needed; replace them"
    if any(low >= high for low, high in zip(facts.lower, facts.upper, strict=True)):
        return flat_text(facts.lower, facts.upper, s.intensity, section)
    return unscalable_text(facts.lower, facts.upper, section)
