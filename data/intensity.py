"""Maps intensities to the network's range and back.

The network sees intensities in [-1, 1] (`NETWORK_RANGE`): LPIPS expects that range, and it is symmetric about the zeros
that pad convolutions. A volume's lower and upper intensity are found on the whole volume, before any cropping, and map
to the two ends; values outside are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from settings.data import IntensitySettings

NETWORK_RANGE = (-1.0, 1.0)

INTENSITY = "data.intensity"
"""The section with the rules of the volumes' intensities."""

# With fewer float32 steps than this between the two ends, no usable contrast is left.
FEWEST_STEPS = 64


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


def unscalable_text(lower: Sequence[float], upper: Sequence[float], section: str) -> str | None:
    """Return the message for a channel whose range float32 cannot scale, or None if there is none.

    Differences or their inverse would overflow, or the numbers are so large that their differences were rounded away.
    """
    limits = np.finfo(np.float32)
    for channel, (low, high) in enumerate(zip(lower, upper, strict=True)):
        is_finite = float(limits.tiny) <= high - low <= float(limits.max)
        if not is_finite or high - low < FEWEST_STEPS * np.spacing(np.float32(max(abs(low), abs(high)))):
            return (
                f"channel {channel} is scaled from {low:.9g} to {high:.9g}, a range that float32 cannot resolve; "
                f"change the unit of its intensities, subtract an offset, or widen {section}"
            )
    return None


def flat_text(lower: Sequence[float], upper: Sequence[float], s: IntensitySettings, section: str = INTENSITY) -> str:
    """Return the message for a channel without contrast between the two percentiles."""
    channel = next(c for c, (low, high) in enumerate(zip(lower, upper, strict=True)) if low >= high)
    _, first, second = s.of_channel(channel)
    return (
        f"channel {channel} is {lower[channel]:g} at both the {first:g}th and the {second:g}th percentile; "
        f"percentile scaling needs contrast; for mostly empty volumes set {section}.lower=0 "
        f"{section}.upper=100, or mode: window; otherwise remove the file"
    )
