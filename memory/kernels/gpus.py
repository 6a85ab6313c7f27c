"""Published figures of GPUs, from which times are predicted. Never imports torch.

TFLOPS are those of tensor cores for dense matrices, with sums in fp32 as torch computes them.
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


_A100 = "NVIDIA A100 data sheet"
_H100 = "NVIDIA H100 data sheet, half of the figures with sparsity"
_H200 = "NVIDIA H200 data sheet, half of the figures with sparsity"
_L40 = "NVIDIA L40S and L40 data sheets"
_L4 = "NVIDIA L4 data sheet, half of the figures with sparsity"
_V100 = "NVIDIA V100 data sheet"
_TURING = "NVIDIA Turing GPU architecture white paper"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper"
_ADA = "NVIDIA Ada GPU architecture white paper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper"
_WORKSTATION = "NVIDIA data sheet, half of the figures with sparsity"


def _cards(
    rows: tuple[tuple[str, int, float, float], ...], source: str, capability: tuple[int, int]
) -> tuple[Gpu, ...]:
    """Return cards for games by their fp32 figures: with sums in fp32, their tensor cores run at half of their rate."""
    half = FULL_RATES[capability] / 2
    return tuple(
        Gpu(f"RTX {name}", memory, bandwidth, half * tflops, tflops, tflops, source, capability)
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
    ("5060", 8, 448, 19.2),
    ("5060 Ti", 8, 448, 23.7),
    ("5070", 12, 672, 30.9),
    ("5070 Ti", 16, 896, 43.9),
    ("5080", 16, 960, 56.3),
    ("5090", 32, 1792, 104.8),
)
# At the lowest boost clock of the range that NVIDIA gives: makers choose the power.
_RTX_30_LAPTOP = (
    ("3060 Laptop", 6, 336, 9.9),
    ("3070 Laptop", 8, 448, 13.2),
    ("3080 Laptop", 8, 448, 15.3),
)
_RTX_40_LAPTOP = (
    ("4060 Laptop", 8, 256, 9),
    ("4070 Laptop", 8, 256, 11.3),
    ("4080 Laptop", 12, 432, 20),
    ("4090 Laptop", 16, 576, 28.3),
)
_LAPTOPS = "NVIDIA's comparison of laptop GPUs, cores at the lowest boost clock"

GPUS = (
    Gpu("A10", 24, 600, 125, 62.5, 31.2, "NVIDIA A10 data sheet", (8, 6)),
    Gpu("A10G", 24, 600, 70, 35, 35, "NVIDIA A10G data sheet, half of the figures with sparsity", (8, 6)),
    Gpu("A30", 24, 933, 165, 82, 10.3, "NVIDIA A30 data sheet"),
    Gpu("A40", 48, 696, 149.7, 74.8, 37.4, "NVIDIA A40 data sheet", (8, 6)),
    Gpu("A100 40GB", 40, 1555, 312, 156, 19.5, _A100),
    Gpu("A100 80GB PCIe", 80, 1935, 312, 156, 19.5, _A100),
    Gpu("A100 80GB SXM", 80, 2039, 312, 156, 19.5, _A100),
    Gpu("B200", 180, 8000, 2250, 1100, 75, "NVIDIA HGX B200 data sheet, half of the figures with sparsity", (10, 0)),
    Gpu("H20", 96, 4000, 148, 74, 44, "NVIDIA H20 data sheet", (9, 0)),
    Gpu("H100 PCIe", 80, 2000, 756, 378, 51, _H100, (9, 0)),
    Gpu("H100 NVL", 94, 3938, 835, 417, 60, _H100, (9, 0)),
    Gpu("H100 SXM", 80, 3350, 989, 494, 67, _H100, (9, 0)),
    Gpu("H200 NVL", 141, 4800, 835, 417, 60, _H200, (9, 0)),
    Gpu("H200 SXM", 141, 4800, 989, 494, 67, _H200, (9, 0)),
    Gpu("L4", 24, 300, 121, 60, 30.3, _L4, (8, 9)),
    Gpu("L40", 48, 864, 181, 90.5, 90.5, _L40, (8, 9)),
    Gpu("L40S", 48, 864, 362, 183, 91.6, _L40, (8, 9)),
    Gpu("Quadro RTX 5000", 16, 448, 89.2, 11.2, 11.2, "NVIDIA Quadro RTX 5000 data sheet", (7, 5)),
    Gpu("Quadro RTX 6000", 24, 672, 130.5, 16.3, 16.3, _TURING, (7, 5)),
    Gpu("Quadro RTX 8000", 48, 672, 130.5, 16.3, 16.3, "NVIDIA Quadro RTX 8000 data sheet", (7, 5)),
    *_cards(_RTX_20, _TURING, (7, 5)),
    *_cards(_RTX_30, _AMPERE + " and NVIDIA's product pages", (8, 6)),
    *_cards(_RTX_30_LAPTOP, _LAPTOPS, (8, 6)),
    *_cards(_RTX_40, _ADA + " and NVIDIA's product pages", (8, 9)),
    *_cards(_RTX_40_LAPTOP, _LAPTOPS, (8, 9)),
    *_cards(_RTX_50, _BLACKWELL + " and NVIDIA's product pages", (12, 0)),
    Gpu("RTX A4000", 16, 448, 76.7, 38.3, 19.2, _WORKSTATION, (8, 6)),
    Gpu("RTX A4500", 20, 640, 94.6, 47.3, 23.7, _WORKSTATION, (8, 6)),
    Gpu("RTX A5000", 24, 768, 111.1, 55.6, 27.8, _WORKSTATION, (8, 6)),
    Gpu("RTX A6000", 48, 768, 154.8, 77.4, 38.7, _AMPERE, (8, 6)),
    Gpu("RTX 4000 Ada", 20, 360, 106.9, 53.5, 26.7, _WORKSTATION, (8, 9)),
    Gpu("RTX 5000 Ada", 32, 576, 261.1, 130.6, 65.3, _WORKSTATION, (8, 9)),
    Gpu("RTX 6000 Ada", 48, 960, 364.2, 182.1, 91.1, _WORKSTATION, (8, 9)),
    Gpu("T4", 16, 320, 65, 8.1, 8.1, "NVIDIA T4 data sheet", (7, 5)),
    Gpu("Titan RTX", 24, 672, 130.5, 16.3, 16.3, _TURING, (7, 5)),
    Gpu("Titan Xp", 12, 547.7, 12.1, 12.1, 12.1, "NVIDIA Titan Xp product page; fp32 is all it has", (6, 1)),
    Gpu("V100 PCIe", 16, 900, 112, 14, 14, _V100, (7, 0)),
    Gpu("V100 SXM", 16, 900, 125, 15.7, 15.7, _V100, (7, 0)),
)
DEFAULT = "A100 80GB SXM"
_DIFFERENT = {"d", "laptop", "max", "mig", "mobile", "q", "super", "ti"}
"""Words that turn a card's name into another card's: an RTX 4090 Laptop GPU is not an RTX 4090."""


def _words(name: str) -> set[str]:
    # The driver names the memory of an H100 or H200 where it names the socket of other cards.
    plain = name.lower().replace("nvidia", "").replace("geforce", "").replace("hbm3e", "sxm").replace("hbm3", "sxm")
    return set(re.findall(r"[a-z]+|\d+[a-z]*", plain))


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
