"""The time that the work of a step takes on a GPU, and what takes most of it. Never imports torch.

A kernel computes, moves bytes, and starts and ends; the three times add up. Each kind of kernel reaches a share of the
card's published peak and bandwidth. A step takes no less than the host needs to start its kernels. The shares were
fitted to published times and checked against others: `docs/prediction.md` has both. Waiting for data and the network
between GPUs are not in it. A step measured on the user's device corrects it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from memory.kernels.gpus import Gpu

LAYOUT, BACKWARD_CONVOLUTION, NARROW_ATTENTION = "layout", "convolution backward", "narrow attention"
"""Kinds of work besides those of `memory.kernels.operators`: cuDNN's copies of contiguous 16-bit tensors, both
gradients of a convolution, and attention whose heads have at most so many channels:"""
NARROW_CHANNELS = 32
BUS_COPY = "copies over PCIe"
"""Kind of the copies of host memory's tensors, which run beside the computation, one after the other."""

HALF_CONVOLUTION = 0.46
TF32_CONVOLUTION = 0.32
FLOAT_CONVOLUTION, FLOAT_CONVOLUTION_BACKWARD = 0.77, 0.40
"""Shares of the peak that convolutions of volumes reach: in 16 bits, with TF32, and in fp32 where there is no TF32. Of
tensor cores it is that of the cores themselves: cards that sum at half the rate reach nearly all of what is left."""
LAYOUT_MOVED = 0.24
"""Share of the bandwidth that copies into cuDNN's layout and back reach."""
MOVED = 0.7
"""That of all other kernels. Not fitted: the fitted rows hardly tell it from the shares of convolutions. Kernels that
stream reach 80 to 90 %; some read twice what is counted once."""
PRODUCT = 0.75
"""Share of the peak that attention and matrix products reach in 16 bits; in fp32 that of convolutions is taken."""
NARROW_PRODUCT = 0.36
"""That of attention whose heads have so few channels that its exponentials take as long as its products."""
BUS_MOVED = 0.85
"""Share of PCIe's bandwidth that copies of pinned memory reach. Not fitted: `docs/prediction.md` has what was measured.
"""
KERNEL_SECONDS = 10e-6
"""What a kernel takes on the device besides its work: its start and its last threads. Not fitted."""
HOST_SECONDS = 14e-6
"""What the host takes to start a kernel from Python: measured with steps of this project whose kernels do nothing."""

SPREAD = (0.8, 1.5)
"""What published steps that were not fitted took, as shares of their prediction: the range that is printed."""
MEASURED_SPREAD = (0.9, 1.1)
"""The same where a step that was measured on the device corrects the prediction."""


@dataclass(frozen=True)
class WorkPart:
    """What kernels of one kind do at one level in one update; `is_half`: in 16 bits."""

    kind: str
    level: int | None
    is_half: bool
    nbytes: int
    flops: int
    kernels: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def seconds_of(part: WorkPart, gpu: Gpu) -> float:
    """Return the time of one part on the device or the bus: computing, moving bytes, and starting kernels."""
    if part.kind == BUS_COPY:  # what is read at one end is written at the other
        return part.nbytes / 2 / (BUS_MOVED * gpu.bus_gbs * 1e9) + part.kernels * KERNEL_SECONDS
    if part.kind == LAYOUT and not gpu.has_tensor_cores:
        return 0.0  # only kernels for tensor cores need the other layout
    moved = part.nbytes / ((LAYOUT_MOVED if part.kind == LAYOUT else MOVED) * gpu.bandwidth_gbs * 1e9)
    return part.flops / (1e12 * _tflops(part, gpu)) + moved + part.kernels * KERNEL_SECONDS


def _tflops(part: WorkPart, gpu: Gpu) -> float:
    """Return the rate at which the kernels of a part compute."""
    if part.is_half and gpu.has_tensor_cores:
        is_convolution = part.kind in ("convolution", BACKWARD_CONVOLUTION)
        share = HALF_CONVOLUTION if is_convolution else NARROW_PRODUCT if part.kind == NARROW_ATTENTION else PRODUCT
        return min(share * gpu.tensor_tflops, gpu.half_tflops)
    if gpu.has_tf32:
        return min(TF32_CONVOLUTION * gpu.tensor_tflops / 2, gpu.tf32_tflops)
    is_backward = part.kind == BACKWARD_CONVOLUTION
    return gpu.float_tflops * (FLOAT_CONVOLUTION_BACKWARD if is_backward else FLOAT_CONVOLUTION)


def predicted_seconds(work: Iterable[WorkPart], gpu: Gpu) -> float:
    """Return the time of an update: that of the device, of the bus, or of the host, whichever takes longest."""
    parts = list(work)
    return max(*_device_and_bus(parts, gpu), HOST_SECONDS * sum(part.kernels for part in parts))


def _device_and_bus(parts: list[WorkPart], gpu: Gpu) -> tuple[float, float]:
    device, bus = (sum(seconds_of(p, gpu) for p in parts if (p.kind == BUS_COPY) == is_bus) for is_bus in (False, True))
    return device, bus


def time_range(expected: float, is_measured: bool = False) -> tuple[float, float]:
    """Return from where to where a time lies, by its prediction; `is_measured`: a measured step has corrected it."""
    low, high = MEASURED_SPREAD if is_measured else SPREAD
    return low * expected, high * expected


def hours_range_text(expected: float, is_measured: bool = False) -> str:
    """Return predicted hours as a range in a unit that people use: "14 to 22 h"."""
    low, high = time_range(expected, is_measured)
    if high >= 48:
        return f"{low / 24:.1f} to {high / 24:.1f} days"
    if high >= 1:
        return f"{low:.1f} to {high:.1f} h"
    return f"{60 * low:.0f} to {60 * high:.0f} min" if high >= 1 / 30 else "under 2 min"


def seconds_range_text(expected: float, is_measured: bool = False) -> str:
    """Return predicted seconds as a range."""
    low, high = time_range(expected, is_measured)
    factor, unit = (1, "s") if high >= 1 else (1000, "ms")
    ends = (factor * low, factor * high)
    return " to ".join(f"{end:.0f}" if end >= 10 else f"{end:.2g}" for end in ends) + f" {unit}"


def dominant_part(work: Iterable[WorkPart], gpu: Gpu) -> tuple[str, int | None, float]:
    """Return kind and level of what takes most of the time, a convolution with its gradients, and the share it takes.

    Of copies over the bus, beside which the device computes, it is the share that is waited for.
    """
    parts = list(work)
    device, bus = _device_and_bus(parts, gpu)
    if bus >= device:
        return BUS_COPY, None, 1 - device / bus if bus else 0.0
    seconds: Counter[tuple[str, int | None]] = Counter()
    for part in parts:
        kind = {BACKWARD_CONVOLUTION: "convolution", NARROW_ATTENTION: "attention"}.get(part.kind, part.kind)
        if kind != BUS_COPY:
            seconds[kind, part.level] += seconds_of(part, gpu)  # type: ignore[assignment]
    (kind, level), most = seconds.most_common(1)[0]
    return kind, level, most / device
