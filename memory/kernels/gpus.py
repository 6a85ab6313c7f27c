"""Published figures of GPUs, from which times are predicted. Never imports torch.

TFLOPS are those of tensor cores for dense matrices, with sums in fp32 as torch computes them. Memory, bandwidth and
fp32 agree with TechPowerUp's database of February 2026. Figures of tensor cores follow from fp32 by the rate of their
generation; those of cards for servers, which have rates of their own, are NVIDIA's.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace

from settings import ConfigError, Problem

OLDEST_WITH_TRITON = (7, 5)
SMALLEST_OF_THEM = 16 << 30
"""The memory of the smallest card in the table that cannot run Triton and that torch still runs on."""
FULL_RATES = {(7, 5): 8, (8, 6): 4, (8, 9): 4, (12, 0): 4}
"""How many times faster than plain fp32 unhindered tensor cores are in 16 bits, by compute capability."""


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


def _cards(
    rows: tuple[tuple[str, int, float, float], ...], capability: tuple[int, int], source: str = _GAMES
) -> tuple[Gpu, ...]:
    """Return cards for games by their fp32 figures: with sums in fp32, their tensor cores run at half of their rate."""
    half = FULL_RATES[capability] / 2
    return tuple(
        Gpu(f"RTX {name}", memory, bandwidth, half * tflops, tflops, tflops, source, capability)
        for name, memory, bandwidth, tflops in rows
    )


def _workstations(rows: tuple[tuple[str, int, float, float], ...], capability: tuple[int, int]) -> tuple[Gpu, ...]:
    """Return cards for workstations by their fp32 figures; their tensor cores run at their full rate."""
    full, tf32 = FULL_RATES[capability], FULL_RATES[capability] / 2 if capability >= (8, 0) else 1
    return tuple(
        Gpu(name, memory, bandwidth, full * tflops, tf32 * tflops, tflops, _SHEET, capability)
        for name, memory, bandwidth, tflops in rows
    )


# Name, GB, GB/s, fp32 TFLOPS at the boost clock of the reference card. Of a card that is sold with two sizes of memory,
# the smaller one.
_RTX_20 = (
    ("2060", 6, 336, 6.5),
    ("2060 SUPER", 8, 448, 7.2),
    ("2070", 8, 448, 7.5),
    ("2070 SUPER", 8, 448, 9.1),
    ("2080", 8, 448, 10.1),
    ("2080 SUPER", 8, 496, 11.2),
    ("2080 Ti", 11, 616, 13.4),
)
_RTX_30 = (
    ("3050", 8, 224, 9.1),
    ("3060", 12, 360, 12.7),
    ("3060 Ti", 8, 448, 16.2),
    ("3070", 8, 448, 20.3),
    ("3070 Ti", 8, 608, 21.7),
    ("3080", 10, 760, 29.8),
    ("3080 Ti", 12, 912, 34.1),
    ("3090", 24, 936, 35.6),
    ("3090 Ti", 24, 1008, 40),
)
_RTX_40 = (
    ("4060", 8, 272, 15.1),
    ("4060 Ti", 8, 288, 22.1),
    ("4070", 12, 504, 29.1),
    ("4070 SUPER", 12, 504, 35.5),
    ("4070 Ti", 12, 504, 40.1),
    ("4070 Ti SUPER", 16, 672, 44.1),
    ("4080", 16, 716.8, 48.7),
    ("4080 SUPER", 16, 736, 52.2),
    ("4090 D", 24, 1008, 73.5),
    ("4090", 24, 1008, 82.6),
)
_RTX_50 = (
    ("5050", 8, 320, 13.2),
    ("5060", 8, 448, 19.2),
    ("5060 Ti", 8, 448, 23.7),
    ("5070", 12, 672, 30.9),
    ("5070 Ti", 16, 896, 43.9),
    ("5080", 16, 960, 56.3),
    ("5090 D", 32, 1792, 104.8),
    ("5090", 32, 1792, 104.8),
)
_RTX_30_LAPTOP = (
    ("3050 Laptop", 4, 192, 5.5),
    ("3050 Ti Laptop", 4, 192, 5.3),
    ("3060 Laptop", 6, 336, 10.9),
    ("3070 Laptop", 8, 448, 16),
    ("3070 Ti Laptop", 8, 448, 16.6),
    ("3080 Laptop", 8, 448, 19),
    ("3080 Ti Laptop", 16, 512, 18.7),
)
_RTX_40_LAPTOP = (
    ("4050 Laptop", 6, 192, 9),
    ("4060 Laptop", 8, 256, 11.6),
    ("4070 Laptop", 8, 256, 15.6),
    ("4080 Laptop", 12, 432, 24.7),
    ("4090 Laptop", 16, 576, 33),
)
_RTX_50_LAPTOP = (
    ("5050 Laptop", 8, 384, 7.7),
    ("5060 Laptop", 8, 384, 9.7),
    ("5070 Laptop", 8, 384, 13.1),
    ("5070 Ti Laptop", 12, 672, 17),
    ("5080 Laptop", 16, 896, 23),
    ("5090 Laptop", 24, 896, 31.8),
)
_TURING = (
    ("Quadro RTX 5000", 16, 448, 11.2),
    ("Quadro RTX 6000", 24, 672, 16.3),
    ("Quadro RTX 8000", 48, 672, 16.3),
    ("T4", 16, 320, 8.1),
    ("Titan RTX", 24, 672, 16.3),
)
_AMPERE = (
    ("A10", 24, 600, 31.2),
    ("A40", 48, 696, 37.4),
    ("RTX A2000", 6, 288, 8),
    ("RTX A4000", 16, 448, 19.2),
    ("RTX A4500", 20, 640, 23.7),
    ("RTX A5000", 24, 768, 27.8),
    ("RTX A6000", 48, 768, 38.7),
)
_ADA = (
    ("L4", 24, 300, 30.3),
    ("L40S", 48, 864, 91.6),
    ("RTX 2000 Ada", 16, 256, 12),
    ("RTX 4000 Ada", 20, 360, 26.7),
    ("RTX 4500 Ada", 24, 432, 39.6),
    ("RTX 5000 Ada", 32, 576, 65.3),
    ("RTX 6000 Ada", 48, 960, 91.1),
)
_BLACKWELL = (
    ("RTX PRO 4000 Blackwell", 24, 672, 36.8),
    ("RTX PRO 4500 Blackwell", 32, 896, 50.5),
    ("RTX PRO 5000 Blackwell", 48, 1344, 66.9),
    ("RTX PRO 6000 Blackwell", 96, 1792, 126),
)

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
    *_workstations(_TURING, (7, 5)),
    *_workstations(_AMPERE, (8, 6)),
    *_workstations(_ADA, (8, 9)),
    *_workstations(_BLACKWELL, (12, 0)),
    *_cards(_RTX_20, (7, 5)),
    *_cards(_RTX_30, (8, 6)),
    *_cards(_RTX_40, (8, 9)),
    *_cards(_RTX_50, (12, 0)),
    *_cards(_RTX_30_LAPTOP, (8, 6), _LAPTOPS),
    *_cards(_RTX_40_LAPTOP, (8, 9), _LAPTOPS),
    *_cards(_RTX_50_LAPTOP, (12, 0), _LAPTOPS),
)
DEFAULT = "A100 80GB SXM"
_DIFFERENT = {"c", "d", "grid", "laptop", "max", "mig", "mobile", "q", "super", "ti"}
"""Words that turn a card's name into another card's or a part of it: an RTX 4090 Laptop GPU is not an RTX 4090."""


def _words(name: str) -> set[str]:
    # The driver names the memory of an H100 or H200 where it names the socket of other cards.
    plain = name.lower().replace("nvidia", "").replace("geforce", "").replace("hbm3e", "sxm").replace("hbm3", "sxm")
    return set(re.findall(r"\d+gb|\d+|[a-z]+", plain))


def find_gpu(name: str) -> Gpu | None:
    """Return the card of a name such as "RTX 4090" or "NVIDIA A100-SXM4-80GB"; None if there is none in the table.

    A name that fits several cards gets the slowest of them.
    """
    asked = _words(name)
    alike = [gpu for gpu in GPUS if asked & _DIFFERENT == _words(gpu.name) & _DIFFERENT]
    fitting = [gpu for gpu in alike if _words(gpu.name) <= asked] or [gpu for gpu in alike if asked <= _words(gpu.name)]
    if not fitting or not asked:
        return None
    closest = max(len(_words(gpu.name)) for gpu in fitting) if _words(fitting[0].name) <= asked else 0
    return min((gpu for gpu in fitting if len(_words(gpu.name)) >= closest), key=lambda gpu: gpu.bandwidth_gbs)


def chosen_gpu(name: str | None) -> Gpu:
    """Return the card that the user named, else the one in this machine, else a common one."""
    return check_gpu(name) if name is not None else known_or_stand_in(_present_name())


def known_or_stand_in(present: str) -> Gpu:
    """Return the card of a driver's name, else a common one; for a card that is not in the table, the name says so."""
    stand_in = check_gpu(DEFAULT)
    if present and not find_gpu(present):
        return replace(stand_in, name=f"{stand_in.name}, in place of {present}, which is not in the table")
    return find_gpu(present) or stand_in


def _present_name() -> str:
    """Return the name of this machine's first GPU, as its driver gives it; empty without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        asked = [program, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")


def check_gpu(name: str) -> Gpu:
    """Return the card of a name from the command line; raise `ConfigError` if it is not in the table."""
    gpu = find_gpu(name)
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise ConfigError([Problem("--gpu", f"found {name!r}", f"allowed: {known}", "take the one most like yours")])
    return gpu
