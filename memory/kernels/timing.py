"""The least time that the work of a step takes on a GPU, and what takes most of it. Never imports torch.

A kernel takes at least the time of its bytes at the published bandwidth, and at least that of its operations at half of
the published peak, which convolutions of volumes hardly exceed. Starting kernels, waiting for data and the network
between GPUs are not in it. A step measured on the user's device corrects it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from memory.kernels.gpus import Gpu

REACHED_PEAK = 0.5
"""The share of the published peak that is taken for reachable."""


@dataclass(frozen=True)
class WorkPart:
    """What kernels of one kind do at one level in one update; `is_half`: in 16 bits."""

    kind: str
    level: int | None
    is_half: bool
    nbytes: int
    flops: int
    kernels: int

    @property
    def place(self) -> str:
        """Return kind and level for a text."""
        return self.kind if self.level is None else f"{self.kind} at level {self.level}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def seconds_of(part: WorkPart, gpu: Gpu) -> float:
    """Return the least time of one part."""
    peak = gpu.half_tflops if part.is_half else gpu.tf32_tflops if part.kind == "convolution" else gpu.float_tflops
    return max(part.nbytes / (gpu.bandwidth_gbs * 1e9), part.flops / (REACHED_PEAK * peak * 1e12))


def least_seconds(work: Iterable[WorkPart], gpu: Gpu) -> float:
    """Return the least time of an update."""
    return sum(seconds_of(part, gpu) for part in work)


@dataclass(frozen=True)
class Dominant:
    """The part of the work that takes most of the time: its place, its share, and what remains without it."""

    kind: str
    level: int | None
    share: float

    @property
    def place(self) -> str:
        """Return kind and level for a text."""
        return self.kind if self.level is None else f"{self.kind} at level {self.level}"

    @property
    def times_cheaper(self) -> float:
        """Return how many times cheaper the step would be without this part."""
        return 1 / max(1e-9, 1 - self.share)


def dominant_part(work: Iterable[WorkPart], gpu: Gpu) -> Dominant | None:
    """Return what takes most of the time; None without work."""
    seconds: Counter[tuple[str, int | None]] = Counter()
    for part in work:
        seconds[part.kind, part.level] += seconds_of(part, gpu)  # type: ignore[assignment]
    total = sum(seconds.values())
    if not total:
        return None
    (kind, level), most = seconds.most_common(1)[0]
    return Dominant(kind, level, most / total)
