"""Published figures of GPUs, from which times are predicted. Never imports torch.

TFLOPS are those of tensor cores for dense matrices, with sums in fp32 as torch computes them. Memory, bandwidth and
fp32 agree with TechPowerUp's database of February 2026. Figures of tensor cores follow from fp32 by the rate of their
generation; those of cards for servers, which have rates of their own, are NVIDIA's.
"""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    capability: tuple[int, int] = (8, 0)

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


_SHEET = "TechPowerUp's database and NVIDIA's data sheet"
_GAMES = "TechPowerUp's database"
_LAPTOPS = "TechPowerUp's database; makers choose the power, so yours may be faster or slower"


def _cards(source: str, *rows: tuple[str, int, float, float, tuple[int, int]]) -> Iterator[Gpu]:
    """Yield cards by their fp32 figures; with sums in fp32, tensor cores of cards for games run at half of their rate.

    A row has name, GB, GB/s, fp32 TFLOPS at the boost clock of the reference card, and capability; of a card that is
    sold with two sizes of memory, the smaller one.
    """
    for name, memory, bandwidth, tflops, capability in rows:
        rate = FULL_RATES[capability] / (1 if source == _SHEET else 2)
        tf32 = rate / 2 * tflops if capability >= (8, 0) else tflops
        yield Gpu(name, memory, bandwidth, rate * tflops, tf32, tflops, source, capability)


GPUS = (
    Gpu("A10G", 24, 600, 70, 35, 31.5, _SHEET, (8, 6)),
    Gpu("A30", 24, 933, 165, 82, 10.3, _SHEET),
    Gpu("A100 40GB", 40, 1555, 312, 156, 19.5, _SHEET),
    Gpu("A100 80GB PCIe", 80, 1935, 312, 156, 19.5, _SHEET),
    Gpu("A100 80GB SXM", 80, 2039, 312, 156, 19.5, _SHEET),
    Gpu("B200", 180, 8000, 2250, 1100, 75, _SHEET, (10, 0)),
    Gpu("H20", 96, 4000, 148, 74, 44, "NVIDIA H20 data sheet", (9, 0)),
    Gpu("H100 PCIe", 80, 2000, 756, 378, 51, _SHEET, (9, 0)),
    Gpu("H100 NVL", 94, 3938, 835, 417, 60, _SHEET, (9, 0)),
    Gpu("H100 SXM", 80, 3350, 989, 494, 67, _SHEET, (9, 0)),
    Gpu("H200 NVL", 141, 4800, 835, 417, 60, _SHEET, (9, 0)),
    Gpu("H200 SXM", 141, 4800, 989, 494, 67, _SHEET, (9, 0)),
    Gpu("L40", 48, 864, 181, 90.5, 90.5, _SHEET, (8, 9)),
    Gpu("Titan Xp", 12, 547.7, 12.1, 12.1, 12.1, f"{_GAMES}; fp32 is all it has", (6, 1)),
    Gpu("V100 PCIe", 16, 900, 112, 14, 14, _SHEET, (7, 0)),
    Gpu("V100 SXM", 16, 900, 125, 15.7, 15.7, _SHEET, (7, 0)),
    *_cards(
        _SHEET,
        ("Quadro RTX 5000", 16, 448, 11.2, (7, 5)),
        ("Quadro RTX 6000", 24, 672, 16.3, (7, 5)),
        ("Quadro RTX 8000", 48, 672, 16.3, (7, 5)),
        ("T4", 16, 320, 8.1, (7, 5)),
        ("Titan RTX", 24, 672, 16.3, (7, 5)),
        ("A10", 24, 600, 31.2, (8, 6)),
        ("A40", 48, 696, 37.4, (8, 6)),
        ("RTX A2000", 6, 288, 8, (8, 6)),
        ("RTX A4000", 16, 448, 19.2, (8, 6)),
        ("RTX A4500", 20, 640, 23.7, (8, 6)),
        ("RTX A5000", 24, 768, 27.8, (8, 6)),
        ("RTX A6000", 48, 768, 38.7, (8, 6)),
        ("L4", 24, 300, 30.3, (8, 9)),
        ("L40S", 48, 864, 91.6, (8, 9)),
        ("RTX 2000 Ada", 16, 256, 12, (8, 9)),
        ("RTX 4000 Ada", 20, 360, 26.7, (8, 9)),
        ("RTX 4500 Ada", 24, 432, 39.6, (8, 9)),
        ("RTX 5000 Ada", 32, 576, 65.3, (8, 9)),
        ("RTX 6000 Ada", 48, 960, 91.1, (8, 9)),
        ("RTX PRO 4000 Blackwell", 24, 672, 36.8, (12, 0)),
        ("RTX PRO 4500 Blackwell", 32, 896, 50.5, (12, 0)),
        ("RTX PRO 5000 Blackwell", 48, 1344, 66.9, (12, 0)),
        ("RTX PRO 6000 Blackwell", 96, 1792, 126, (12, 0)),
    ),
    *_cards(
        _GAMES,
        ("RTX 2060", 6, 336, 6.5, (7, 5)),
        ("RTX 2060 SUPER", 8, 448, 7.2, (7, 5)),
        ("RTX 2070", 8, 448, 7.5, (7, 5)),
        ("RTX 2070 SUPER", 8, 448, 9.1, (7, 5)),
        ("RTX 2080", 8, 448, 10.1, (7, 5)),
        ("RTX 2080 SUPER", 8, 496, 11.2, (7, 5)),
        ("RTX 2080 Ti", 11, 616, 13.4, (7, 5)),
        ("RTX 3050", 8, 224, 9.1, (8, 6)),
        ("RTX 3060", 12, 360, 12.7, (8, 6)),
        ("RTX 3060 Ti", 8, 448, 16.2, (8, 6)),
        ("RTX 3070", 8, 448, 20.3, (8, 6)),
        ("RTX 3070 Ti", 8, 608, 21.7, (8, 6)),
        ("RTX 3080", 10, 760, 29.8, (8, 6)),
        ("RTX 3080 Ti", 12, 912, 34.1, (8, 6)),
        ("RTX 3090", 24, 936, 35.6, (8, 6)),
        ("RTX 3090 Ti", 24, 1008, 40, (8, 6)),
        ("RTX 4060", 8, 272, 15.1, (8, 9)),
        ("RTX 4060 Ti", 8, 288, 22.1, (8, 9)),
        ("RTX 4070", 12, 504, 29.1, (8, 9)),
        ("RTX 4070 SUPER", 12, 504, 35.5, (8, 9)),
        ("RTX 4070 Ti", 12, 504, 40.1, (8, 9)),
        ("RTX 4070 Ti SUPER", 16, 672, 44.1, (8, 9)),
        ("RTX 4080", 16, 716.8, 48.7, (8, 9)),
        ("RTX 4080 SUPER", 16, 736, 52.2, (8, 9)),
        ("RTX 4090 D", 24, 1008, 73.5, (8, 9)),
        ("RTX 4090", 24, 1008, 82.6, (8, 9)),
        ("RTX 5050", 8, 320, 13.2, (12, 0)),
        ("RTX 5060", 8, 448, 19.2, (12, 0)),
        ("RTX 5060 Ti", 8, 448, 23.7, (12, 0)),
        ("RTX 5070", 12, 672, 30.9, (12, 0)),
        ("RTX 5070 Ti", 16, 896, 43.9, (12, 0)),
        ("RTX 5080", 16, 960, 56.3, (12, 0)),
        ("RTX 5090 D", 32, 1792, 104.8, (12, 0)),
        ("RTX 5090", 32, 1792, 104.8, (12, 0)),
    ),
    *_cards(
        _LAPTOPS,
        ("RTX 3050 Laptop", 4, 192, 5.5, (8, 6)),
        ("RTX 3050 Ti Laptop", 4, 192, 5.3, (8, 6)),
        ("RTX 3060 Laptop", 6, 336, 10.9, (8, 6)),
        ("RTX 3070 Laptop", 8, 448, 16, (8, 6)),
        ("RTX 3070 Ti Laptop", 8, 448, 16.6, (8, 6)),
        ("RTX 3080 Laptop", 8, 448, 19, (8, 6)),
        ("RTX 3080 Ti Laptop", 16, 512, 18.7, (8, 6)),
        ("RTX 4050 Laptop", 6, 192, 9, (8, 9)),
        ("RTX 4060 Laptop", 8, 256, 11.6, (8, 9)),
        ("RTX 4070 Laptop", 8, 256, 15.6, (8, 9)),
        ("RTX 4080 Laptop", 12, 432, 24.7, (8, 9)),
        ("RTX 4090 Laptop", 16, 576, 33, (8, 9)),
        ("RTX 5050 Laptop", 8, 384, 7.7, (12, 0)),
        ("RTX 5060 Laptop", 8, 384, 9.7, (12, 0)),
        ("RTX 5070 Laptop", 8, 384, 13.1, (12, 0)),
        ("RTX 5070 Ti Laptop", 12, 672, 17, (12, 0)),
        ("RTX 5080 Laptop", 16, 896, 23, (12, 0)),
        ("RTX 5090 Laptop", 24, 896, 31.8, (12, 0)),
    ),
)
DEFAULT = "A100 80GB SXM"
TABLE = "memory/kernels/gpus.py"
_DIFFERENT = {"c", "d", "grid", "laptop", "max", "mig", "mobile", "q", "super", "ti"}
"""Words that turn a card's name into another card's or a part of it: an RTX 4090 Laptop GPU is not an RTX 4090."""


def _words(name: str) -> set[str]:
    # The driver names the memory of an H100 or H200 where it names the socket of other cards.
    plain = name.lower().replace("nvidia", "").replace("geforce", "").replace("hbm3e", "sxm").replace("hbm3", "sxm")
    plain = re.sub(r"(\d{4})s\b", r"\1 super", plain)
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
