"""Finds percentiles of a volume's intensities, and maps intensities to the network's range and back.

The network sees intensities in [-1, 1] (`NETWORK_RANGE`): LPIPS expects that range, and it is symmetric about the zeros
that pad convolutions. A volume's lower and upper intensity are found on the whole volume, before any cropping, and map
to the two ends; values outside are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.header import Stored
from settings.data import IntensitySettings

NETWORK_RANGE = (-1.0, 1.0)

INTENSITY = "data.intensity"
"""The section with the rules of the volumes' intensities."""

# With fewer float32 steps than this between the two ends, no usable contrast is left.
FEWEST_STEPS = 64

# Voxels converted at a time, so that scaling needs no second copy of the volume.
PART = 1 << 18

# Planes whose neighbouring voxels are compared.
MOST_PLANES = 16


def scale_to_network(voxels: np.ndarray, lower: Sequence[float], upper: Sequence[float]) -> np.ndarray:
    """Clip each channel and map it to the network's range, in place; return the same array."""
    low, high = NETWORK_RANGE
    for channel, first, last in zip(voxels, lower, upper, strict=True):
        np.clip(channel, np.float32(first), np.float32(last), out=channel)
        channel -= np.float32(first)
        channel *= np.float32((high - low) / (last - first))
        channel += np.float32(low)
        np.clip(channel, low, high, out=channel)
    return voxels


def to_intensities(unit: np.ndarray, lower: Sequence[float], upper: Sequence[float]) -> np.ndarray:
    """Map a (C, D, H, W) volume from [0, 1] to intensities from `lower` to `upper`, of each channel."""
    low, high = (np.array(ends, np.float32)[:, None, None, None] for ends in (lower, upper))
    return unit * (high - low) + low


def range_problem(
    lower: Sequence[float], upper: Sequence[float], s: IntensitySettings, section: str = INTENSITY
) -> str | None:
    """Return why float32 cannot scale one of the channels from these ranges, or None if it can scale all."""
    limits = np.finfo(np.float32)
    for channel, (low, high) in enumerate(zip(lower, upper, strict=True)):
        if low >= high:
            _, first, second = s.of_channel(channel)
            return (
                f"channel {channel} is {low:g} at both the {first:g}th and the {second:g}th percentile; percentile "
                f"scaling needs contrast; for mostly empty volumes set {section}.lower=0 {section}.upper=100, or mode: "
                "window; otherwise remove the file"
            )
        # Differences or their inverse would overflow, or the numbers are so large that differences were rounded away.
        is_finite = float(limits.tiny) <= high - low <= float(limits.max)
        if not is_finite or high - low < FEWEST_STEPS * np.spacing(np.float32(max(abs(low), abs(high)))):
            return (
                f"channel {channel} is scaled from {low:.9g} to {high:.9g}, a range that float32 cannot resolve; "
                f"change the unit of its intensities, subtract an offset, or widen {section}"
            )
    return None


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
