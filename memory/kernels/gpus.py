"""Published figures of GPUs, and the time that the work of a step takes on them. Never imports torch.

TFLOPS are those of tensor cores for dense matrices, with sums in fp32 as torch computes them. Memory, bandwidth and
fp32 agree with TechPowerUp's database of February 2026, but for an RTX 2000 Ada, where NVIDIA's bandwidth is lower.
Figures of tensor cores follow from fp32 by the rate of their generation; those of cards for servers, which have rates
of their own, are NVIDIA's.
"""

from __future__ import annotations

import csv
import difflib
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from settings import ConfigError, Problem

OLDEST_WITH_TRITON = (7, 5)
SMALLEST_OF_THEM = 16 << 30
"""The memory of the smallest card in the table that cannot run Triton and that torch still runs on."""
FULL_RATES = {(7, 5): 8, (8, 6): 4, (8, 9): 4, (12, 0): 4}
"""How many times faster than plain fp32 unhindered tensor cores are in 16 bits, by compute capability."""
BUS_GBS = ((6, 15.75), (8, 31.5), (9, 63.0))
"""GB/s in each direction of 16 lanes of PCIe 3.0, 4.0 and 5.0, and the capability from which on cards have them."""
EIGHT_LANES = (
    *("RTX 2000 Ada", "RTX 3050", "RTX 4050", "RTX 4060", "RTX 4070 Laptop"),
    *("RTX 5050", "RTX 5060", "RTX 5070 Laptop"),
)
"""The cards whose chips have half as many, with their variants."""


@dataclass(frozen=True)
class Gpu:
    """One card: memory and its bandwidth, peak compute in 16 bits, with TF32 and in fp32, and compute capability.

    A card without TF32 computes such convolutions in fp32; one without tensor cores computes all in fp32.
    """

    name: str
    memory_gb: int
    bandwidth_gbs: float
    half_tflops: float
    tf32_tflops: float
    float_tflops: float
    source: str
    capability: tuple[int, int]

    @property
    def bus_gbs(self) -> float:
        """Return the bandwidth between host and card, in each direction, where the host has as new a PCIe."""
        whole = next(rate for capability, rate in reversed(BUS_GBS) if self.capability[0] >= capability)
        return whole / 2 if self.name.startswith(EIGHT_LANES) else whole

    @property
    def without_triton(self) -> int:
        """Return the memory of a card that cannot run Triton, as predictions take it; 0 if it can."""
        return SMALLEST_OF_THEM if self.capability < OLDEST_WITH_TRITON else 0

    @property
    def has_tensor_cores(self) -> bool:
        """Return whether the card computes 16-bit convolutions on tensor cores."""
        return self.capability >= (7, 0)

    @property
    def has_tf32(self) -> bool:
        """Return whether the card computes fp32 convolutions on tensor cores."""
        return self.capability >= (8, 0)

    @property
    def tensor_tflops(self) -> float:
        """Return the 16-bit peak of the tensor cores themselves: cards for games sum in fp32 at half of it."""
        return max(self.half_tflops, FULL_RATES.get(self.capability, 0) * self.float_tflops)


_SOURCES = {
    "sheet": "TechPowerUp's database and NVIDIA's data sheet",
    "games": "TechPowerUp's database",
    "laptop": "TechPowerUp's database; makers choose the power, so yours may be faster or slower",
}
TABLE = "memory/kernels/gpus.csv"


def _cards() -> Iterator[Gpu]:
    """Yield the cards of the table: of those sold with two sizes of memory the smaller one, at the boost clock.

    Where it leaves out the figures of tensor cores, they follow from fp32: with sums in fp32, those of cards for games
    and laptops run at half of their rate.
    """
    with Path(__file__).with_name("gpus.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            major, minor = map(int, row["capability"].split("."))
            tflops, half, tf32 = float(row["float_tflops"]), row["half_tflops"], row["tf32_tflops"]
            if not half:
                rate = FULL_RATES[major, minor] / (1 if row["source"] == "sheet" else 2)
                half, tf32 = rate * tflops, rate / 2 * tflops if major >= 8 else tflops
            source = _SOURCES.get(row["source"], row["source"])
            figures = (int(row["memory_gb"]), float(row["bandwidth_gbs"]), float(half), float(tf32), tflops)
            yield Gpu(row["name"], *figures, source, (major, minor))


GPUS = tuple(_cards())
DEFAULT = "A100 80GB SXM"
_DIFFERENT = {"c", "d", "grid", "laptop", "m", "max", "mig", "mobile", "notebook", "q", "sff", "super", "ti"}
"""Words that turn a card's name into another card's or a part of it: an RTX 4090 Laptop GPU is not an RTX 4090."""


def _words(name: str) -> set[str]:
    # The driver names the memory of an H100 or H200 where it names the socket of other cards.
    plain = name.lower().replace("nvidia", "").replace("geforce", "").replace("hbm3e", "sxm").replace("hbm3", "sxm")
    plain = re.sub(r"(\d{4})[ -]?s\b", r"\1 super", plain)
    return set(re.findall(r"\d+gb|\d+|ti(?=super|laptop)|[a-z]+", re.sub(r"(\d)[ -]gb", r"\1gb", plain)))


def matching_gpus(name: str) -> list[Gpu]:
    """Return the cards of a name such as "RTX 4090" or "NVIDIA A100-SXM4-80GB"; several if it names part of each."""
    asked = _words(name)
    alike = [(gpu, _words(gpu.name)) for gpu in GPUS if asked and asked & _DIFFERENT == _words(gpu.name) & _DIFFERENT]
    whole = [(gpu, words) for gpu, words in alike if words <= asked]
    closest = max((len(words) for _, words in whole), default=0)
    return [gpu for gpu, words in whole if len(words) == closest] or [gpu for gpu, words in alike if asked <= words]


def find_gpu(name: str) -> Gpu | None:
    """Return the card that a driver calls so, the slowest of those that it may be; None if it is not in the table."""
    return min(matching_gpus(name), key=lambda gpu: gpu.bandwidth_gbs, default=None)


def check_gpu(name: str) -> Gpu:
    """Return the card that the command line names; raise `ConfigError` if the table does not have it."""
    found = matching_gpus(name)
    if len(found) == 1:
        return found[0]
    if found:
        what, names, remedy = f"which {len(found)} cards are called", [gpu.name for gpu in found], "name one of them"
    else:
        what, remedy = f"which is none of the {len(GPUS)} cards in {TABLE}", "take the one most like yours"
        names = difflib.get_close_matches(name.upper(), [gpu.name for gpu in GPUS], n=5, cutoff=0)
    allowed = f"{'allowed' if found else 'the nearest'}: {', '.join(names)}"
    raise ConfigError([Problem("--gpu", f"found {name!r}, {what}", allowed, remedy)])


def chosen_gpu(name: str | None) -> Gpu:
    """Return the card that the user named, else the one in this machine, else a common one."""
    return check_gpu(name) if name is not None else known_or_stand_in(_present_name())


def known_or_stand_in(present: str) -> Gpu:
    """Return the card of a driver's name, else a common one; for a card that is not in the table, the name says so."""
    stand_in = check_gpu(DEFAULT)
    if present:
        stand_in = replace(stand_in, name=f"{stand_in.name}, in place of {present}, which is not in the table")
    return find_gpu(present) or stand_in


def _present_name() -> str:
    """Return the name of this machine's first GPU, as its driver gives it; empty without one."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")


# A kernel computes, moves bytes, and starts and ends; the three times add up. Each kind of kernel reaches a share of
# the card's published peak and bandwidth. A step takes no less than the host needs to start its kernels. The shares
# were fitted to published times and checked against others: docs/prediction.md has both. Waiting for data and the
# network between GPUs are not in it. A step measured on the user's device corrects it.

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
