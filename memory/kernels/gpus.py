"""Published figures of current GPUs, for lower bounds of the time. Never imports torch.

TFLOPS are those of tensor cores for dense matrices, with sums in fp32 as torch computes them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from settings import ConfigError, Problem

OLDEST_WITH_TRITON = (7, 5)
SMALLEST_OF_THEM = 16 << 30
"""The memory of the smallest card in the table that cannot run Triton."""


@dataclass(frozen=True)
class Gpu:
    """One card: memory bandwidth, peak compute for 16-bit tensors, for TF32 and for fp32, and compute capability.

    A card without TF32 computes such convolutions in fp32.
    """

    name: str
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

GPUS = (
    Gpu("A10", 600, 125, 62.5, 31.2, "NVIDIA A10 data sheet", (8, 6)),
    Gpu("A30", 933, 165, 82, 10.3, "NVIDIA A30 data sheet"),
    Gpu("A40", 696, 149.7, 74.8, 37.4, "NVIDIA A40 data sheet", (8, 6)),
    Gpu("A100 40GB", 1555, 312, 156, 19.5, _A100),
    Gpu("A100 80GB PCIe", 1935, 312, 156, 19.5, _A100),
    Gpu("A100 80GB SXM", 2039, 312, 156, 19.5, _A100),
    Gpu("H100 PCIe", 2000, 756, 378, 51, _H100, (9, 0)),
    Gpu("H100 SXM", 3350, 989, 494, 67, _H100, (9, 0)),
    Gpu("H200 SXM", 4800, 989, 494, 67, _H200, (9, 0)),
    Gpu("L4", 300, 121, 60, 30.3, _L4, (8, 9)),
    Gpu("L40", 864, 181, 90.5, 90.5, _L40, (8, 9)),
    Gpu("L40S", 864, 362, 183, 91.6, _L40, (8, 9)),
    Gpu("RTX 2080 Ti", 616, 53.8, 13.4, 13.4, _TURING, (7, 5)),
    Gpu("RTX 3080", 760, 59.5, 29.8, 29.8, _AMPERE, (8, 6)),
    Gpu("RTX 3090", 936, 71, 35.6, 35.6, _AMPERE, (8, 6)),
    Gpu("RTX 4080", 716.8, 97.5, 48.7, 48.7, _ADA, (8, 9)),
    Gpu("RTX 4090", 1008, 165, 82.6, 82.6, _ADA, (8, 9)),
    Gpu("RTX 5080", 960, 112.6, 56.3, 56.3, _BLACKWELL, (12, 0)),
    Gpu("RTX 5090", 1792, 209.5, 104.8, 104.8, _BLACKWELL, (12, 0)),
    Gpu("RTX A6000", 768, 154.8, 77.4, 38.7, _AMPERE, (8, 6)),
    Gpu("T4", 320, 65, 8.1, 8.1, "NVIDIA T4 data sheet", (7, 5)),
    Gpu("V100 PCIe", 900, 112, 14, 14, _V100, (7, 0)),
    Gpu("V100 SXM", 900, 125, 15.7, 15.7, _V100, (7, 0)),
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
    fitting = [gpu for gpu in alike if _words(gpu.name) <= asked] or [gpu for gpu in GPUS if asked <= _words(gpu.name)]
    if not fitting or not asked:
        return None
    closest = max(len(_words(gpu.name)) for gpu in fitting) if _words(fitting[0].name) <= asked else 0
    return min((gpu for gpu in fitting if len(_words(gpu.name)) >= closest), key=lambda gpu: gpu.bandwidth_gbs)


def chosen_gpu(name: str | None) -> Gpu:
    """Return the card that the user named, else the one in this machine, else a common one."""
    if name is not None:
        return check_gpu(name)
    return find_gpu(_present_name()) or check_gpu(DEFAULT)


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
