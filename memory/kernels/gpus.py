"""Published figures of current GPUs, for lower bounds of the time. Never imports torch.

TFLOPS are those of tensor cores for dense matrices, with sums in fp32 as torch computes them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from settings import ConfigError, Problem


@dataclass(frozen=True)
class Gpu:
    """One card: memory bandwidth, and peak compute for 16-bit tensors, for TF32 and for fp32."""

    name: str
    bandwidth_gbs: float
    half_tflops: float
    tf32_tflops: float
    float_tflops: float
    source: str


_A100 = "NVIDIA A100 data sheet"
_H100 = "NVIDIA H100 data sheet, half of the figures with sparsity"
_L40 = "NVIDIA L40S and L40 data sheets"
_ADA = "NVIDIA Ada GPU architecture white paper"

GPUS = (
    Gpu("A100 40GB", 1555, 312, 156, 19.5, _A100),
    Gpu("A100 80GB PCIe", 1935, 312, 156, 19.5, _A100),
    Gpu("A100 80GB SXM", 2039, 312, 156, 19.5, _A100),
    Gpu("H100 PCIe", 2000, 756, 378, 51, _H100),
    Gpu("H100 SXM", 3350, 989, 494, 67, _H100),
    Gpu("L40", 864, 181, 90.5, 90.5, _L40),
    Gpu("L40S", 864, 362, 183, 91.6, _L40),
    Gpu("RTX 4090", 1008, 165, 82.6, 82.6, _ADA),
)
DEFAULT = "A100 80GB SXM"


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|\d+[a-z]*", name.lower().replace("nvidia", "").replace("geforce", "")))


def find_gpu(name: str) -> Gpu | None:
    """Return the card of a name such as "RTX 4090" or "NVIDIA A100-SXM4-80GB"; None if there is none in the table.

    A name that fits several cards gets the slowest of them.
    """
    asked = _words(name)
    fitting = [gpu for gpu in GPUS if _words(gpu.name) <= asked] or [gpu for gpu in GPUS if asked <= _words(gpu.name)]
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
