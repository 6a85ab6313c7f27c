"""Finds exact minima, maxima and percentiles by counting: no sorting, and no copy of the volume.

Integers of up to 16 bits are counted directly. Everything else is counted as float32, first by the upper 16 bits of
each number and then, where a wanted rank lies, by the lower 16.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from data.files.header import Stored

# Voxels counted at a time: small enough for the cache, large enough that Python's share of the time is small.
PART = 1 << 18

# Planes whose neighbouring voxels are compared.
MOST_PLANES = 16

# Tables that are added up whole for each part.
FEW_ROWS = 16

HALVES = 1 << 16
# The upper halves of all numbers in ascending order of the numbers: for negative ones larger bits are smaller numbers.
ASCENDING = np.concatenate([np.arange(0xFFFF, 0x7FFF, -1), np.arange(0x8000)])
# The first and the last of them are those of infinity and NaN.
NOT_FINITE = 0x80


class Ranking(ABC):
    """The intensities of one channel in ascending order, of which only the asked ranks are looked up."""

    count: int
    """Number of finite voxels."""
    num_not_finite: int
    """Number of voxels that are NaN or infinite."""
    is_whole: bool
    """Whether all finite values are whole numbers."""

    @abstractmethod
    def at(self, ranks: Sequence[int]) -> np.ndarray:
        """Return the intensities at these ranks as float32; rank 0 is the lowest finite intensity."""

    @abstractmethod
    def share_up_to(self, value: float) -> float:
        """Return the share of finite voxels up to this intensity, to about a hundredth of the intensity."""

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Return percentiles with linear interpolation, bit for bit as `np.percentile` does for float32."""
        places = [min((self.count - 1) * (percent / 100), self.count - 1) for percent in percents]
        below = [min(math.floor(place), max(self.count - 2, 0)) for place in places]
        ends = self.at([rank for low in below for rank in (low, min(low + 1, self.count - 1))]).reshape(-1, 2)
        return [_between(a, b, place - low) for (a, b), place, low in zip(ends, places, below, strict=True)]


def rank(channel: Stored) -> Ranking:
    """Count the intensities of a single-channel volume."""
    kind, size = channel.array.dtype.kind, channel.array.dtype.itemsize
    return _Integers(channel) if kind in "biu" and size <= 2 else _Numbers(channel)


class _Integers(Ranking):
    def __init__(self, channel: Stored) -> None:
        native = channel.array.dtype.newbyteorder("=")
        unsigned = np.dtype(f"u{native.itemsize}")
        counts = np.zeros(1 << 8 * native.itemsize, np.int64)
        for part in _parts(channel.array):
            counts += np.bincount(part.astype(native, copy=False).view(unsigned), minlength=len(counts))
        present = np.flatnonzero(counts)
        values = channel.values(present.astype(unsigned).view(native))
        counts = counts[present]
        finite = np.isfinite(values)
        self.num_not_finite = int(counts[~finite].sum())
        # A slope below zero reverses the order.
        order = np.argsort(values[finite], kind="stable")
        self._values = values[finite][order]
        self._ends = np.cumsum(counts[finite][order])
        self.count = int(self._ends[-1]) if len(self._ends) else 0
        self.is_whole = _is_whole(self._values)

    def at(self, ranks: Sequence[int]) -> np.ndarray:
        return self._values[np.searchsorted(self._ends, ranks, side="right")]

    def share_up_to(self, value: float) -> float:
        below = int(np.searchsorted(self._values, np.float32(value), side="right"))
        return float(self._ends[below - 1] / self.count) if below else 0.0


class _Numbers(Ranking):
    def __init__(self, channel: Stored) -> None:
        self._channel = channel
        counts = np.zeros(HALVES, np.int64)
        for _, upper in self._halves():
            counts += np.bincount(upper, minlength=HALVES)
        counts = counts[ASCENDING]
        self.num_not_finite = int(counts[:NOT_FINITE].sum() + counts[-NOT_FINITE:].sum())
        counts[:NOT_FINITE] = counts[-NOT_FINITE:] = 0
        self._ends = np.cumsum(counts)
        self.count = int(self._ends[-1])
        # Stops at the first part with a fraction, which is the first one of most images.
        self.is_whole = all(_is_whole(channel.values(part)) for part in _parts(channel.array))

    def at(self, ranks: Sequence[int]) -> np.ndarray:
        places = np.searchsorted(self._ends, ranks, side="right")
        tables = {place: np.cumsum(table) for place, table in self._count_lower(np.unique(places)).items()}
        found = []
        for wanted, place in zip(ranks, places.tolist(), strict=True):
            before = int(self._ends[place - 1]) if place else 0
            half = np.searchsorted(tables[place], wanted - before, side="right")
            found.append(_numbers(place, np.array([half])))
        return np.concatenate(found)

    def share_up_to(self, value: float) -> float:
        upper = int(np.array(value + 0.0, np.float32).view(np.uint32) >> 16)
        return float(self._ends[HALVES // 2 + upper if upper <= 0x7FFF else 0xFFFF - upper] / self.count)

    def _count_lower(self, places: np.ndarray) -> dict[int, np.ndarray]:
        """Count the lower halves of the voxels whose upper halves have these places in `ASCENDING`."""
        row_of = np.full(HALVES, -1, np.int64)
        row_of[ASCENDING[places]] = np.arange(len(places))
        counts = np.zeros((len(places), HALVES), np.int64)
        for lower, upper in self._halves():
            rows = row_of[upper]
            wanted = rows >= 0
            rows, lower = rows[wanted], lower[wanted]
            if len(places) <= FEW_ROWS:
                counts += np.bincount(rows * HALVES + lower, minlength=counts.size).reshape(counts.shape)
            else:
                np.add.at(counts, (rows, lower), 1)
        # Of a negative number, larger bits mean a smaller number.
        negative = ASCENDING[places] > 0x7FFF
        counts[negative] = counts[negative, ::-1]
        return {int(place): table for place, table in zip(places, counts, strict=True)}

    def _halves(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the lower and the upper 16 bits of the voxels, part by part."""
        for part in _parts(self._channel.array):
            bits = self._channel.values(part).astype("<f4", copy=False).view("<u2")
            yield bits[0::2], bits[1::2]


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


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    # In memory order this is a view unless channels are interleaved.
    flat = array.ravel(order="K")
    for start in range(0, len(flat), PART):
        yield flat[start : start + PART]


def _numbers(place: int, lower: np.ndarray) -> np.ndarray:
    """Return the numbers with the upper half at this place in `ASCENDING` and these lower halves, counted upwards."""
    upper = int(ASCENDING[place])
    bits = lower if upper <= 0x7FFF else HALVES - 1 - lower
    return (np.uint32(upper << 16) | bits.astype(np.uint32)).view(np.float32)


def _between(a: np.float32, b: np.float32, t: float) -> float:
    difference = float(b - a)
    # Adding zero turns -0.0 into 0.0.
    return (float(a) + difference * t if t < 0.5 else float(b) - difference * (1 - t)) + 0.0


def _is_whole(values: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(((values == np.round(values)) | ~np.isfinite(values)).all())
