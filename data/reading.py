"""Reads one volume: measures its intensities, and brings it to the network's grid and range."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.files.header import Header, Stored
from data.formats import content_digest, read_stored, signature
from data.geometry import geometry_of
from data.intensity import INTENSITY, flat_text, scale_to_network, unscalable_text
from data.ranking import equal_neighbours, rank
from runtime.files.names import printable
from settings import DataError
from settings.data import DataSettings


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
    affine: tuple[tuple[float, ...], ...]
    dtype: str
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
    digest: str
    background: float = math.nan

    @property
    def header(self) -> Header:
        """Return the header of the file."""
        affine = np.array(self.affine)
        return Header(self.shape, self.num_channels, affine, self.dtype, self.has_spacing, self.axes)


def measure(path: Path, s: DataSettings, is_known: np.ndarray | None = None) -> tuple[Stored, VolumeFacts]:
    """Read one whole file and measure it; raise DataError, naming it, if it cannot be read.

    With `is_known`, bool on the file's grid, only the voxels where it is True are measured.
    """
    before = signature(path)
    stored, header = read_stored(path)
    digest = content_digest(path)
    if signature(path) != before:
        raise DataError(f"{printable(path)}: it changed while it was read; run the same command again")
    if s.frame is not None and header.num_channels > 1:
        if s.frame >= header.num_channels:
            raise DataError(
                f"{printable(path)}: data.frame is {s.frame}, and it holds {header.num_channels} volumes "
                f"({' x '.join(map(str, header.axes))}); 0 to {header.num_channels - 1} is allowed; change it"
            )
        stored, header = stored.channel(s.frame), replace(header, num_channels=1)
    measured = stored if is_known is None else replace(stored, array=stored.array[:, is_known][:, :, None, None])
    channels = [rank(measured.channel(number)) for number in range(header.num_channels)]
    num_not_finite = sum(channel.num_not_finite for channel in channels)
    # A file with more channels than there are rules is refused later; until then its last ones go by the last rule.
    most = s.intensity.num_rules if s.intensity.num_rules > 1 else len(channels)
    rules = [s.intensity.of_channel(min(number, most - 1)) for number in range(len(channels))]
    found = []
    for channel, (mode, *ends) in zip(channels, rules, strict=True):
        # One call for all of them, because each call may be a pass over the volume.
        asked = (0.0, 1.0, 50.0, 99.0, 100.0, *(() if mode == "window" else ends))
        found.append(channel.percentiles(asked) if channel.count else [float("nan")] * len(asked))
    if num_not_finite:
        ranges = [(0.0, 0.0)] * len(channels)
    else:
        ranges = [
            (lower, upper) if mode == "window" else (values[5], values[6])
            for (mode, lower, upper), values in zip(rules, found, strict=True)
        ]
    is_whole = all(channel.is_whole for channel in channels) and not num_not_finite
    known = [values for values, channel in zip(found, channels, strict=True) if channel.count] or found
    facts = VolumeFacts(
        axes=header.axes,
        shape=header.shape,
        num_channels=header.num_channels,
        affine=tuple(tuple(row) for row in header.affine.tolist()),
        dtype=header.dtype,
        has_spacing=header.has_spacing,
        minimum=min(values[0] for values in known),
        maximum=max(values[4] for values in known),
        num_not_finite=num_not_finite,
        lower=tuple(low for low, _ in ranges),
        upper=tuple(high for _, high in ranges),
        low=found[0][1],
        median=found[0][2],
        high=found[0][3],
        is_whole=is_whole,
        equal_neighbours=min(equal_neighbours(measured.channel(n)) for n in range(len(channels))) if is_whole else 0.0,
        digest=digest,
        background=channels[0].share_up_to(0.9 * found[0][1] + 0.1 * found[0][3]) if channels[0].count else math.nan,
    )
    return stored, facts


def on_grid(stored: Stored, facts: VolumeFacts, s: DataSettings) -> np.ndarray:
    """Return a measured volume on the network's grid and in its range, as float32 (C, D, H, W)."""
    geometry = geometry_of(facts.header, s)
    oriented = geometry.oriented(stored.array)

    def planes(part: slice) -> np.ndarray:
        values = stored.values(oriented[..., part])
        for channel, low, high in zip(values, facts.lower, facts.upper, strict=True):
            scale_to_network(channel, low, high)
        return values

    return geometry.to_network_grid(facts.num_channels, planes)


def unusable(path: Path, facts: VolumeFacts, s: DataSettings, section: str = INTENSITY) -> str | None:
    """Return why a measured volume cannot be scaled, or None if it can; `section` has the rules of its intensities."""
    if facts.num_not_finite:
        return (
            f"{printable(path)}: {facts.num_not_finite:,} {'voxel is' if facts.num_not_finite == 1 else 'voxels are'} "
            "NaN or infinite; finite numbers are needed; replace them"
        )
    if any(low >= high for low, high in zip(facts.lower, facts.upper, strict=True)):
        return f"{printable(path)}: {flat_text(facts.lower, facts.upper, s.intensity, section)}"
    reason = unscalable_text(facts.lower, facts.upper, section)
    return None if reason is None else f"{printable(path)}: {reason}"
