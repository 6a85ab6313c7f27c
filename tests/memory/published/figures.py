"""Figures that others read from real GPUs, in GiB, and what is predicted; docs/prediction.md has the sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memory.predict.allocator import AllocatorLimits, replay
from memory.predict.emulation import emulated, tracked
from memory.predict.prediction import GIB
from memory.predict.tracker import MemoryTracker
from models import monai_import  # noqa: F401  # first: it keeps MONAI's import short
from tests.memory.published.qwen_image import LATENT_CHANNELS, QwenImageVae
from tests.memory.published.unets import maisi_networks

OLD_CUDNN = 8902
"""A cuDNN of the time when the figures of the fallback were published, before 64-bit indices."""

QWEN_DECODE = {
    (512, 512): (1.274, 1.311),
    (768, 768): (2.563, 2.992),
    (832, 1248): (4.331, 5.211),
    (1024, 1024): (4.369, 5.254),
    (1088, 1920): (8.468, 10.408),
    (1280, 1280): (6.693, 8.188),
    (1536, 1024): (6.434, 7.857),
    (1536, 1536): (9.532, 11.736),
    (1792, 1792): (12.884, 15.949),
    (2048, 2048): (16.754, 20.799),
}
QWEN_ENCODE = {
    (512, 512): (0.900, 0.711),
    (768, 768): (1.724, 1.594),
    (832, 1248): (2.854, 2.824),
    (1024, 1024): (2.879, 2.848),
    (1088, 1920): (5.498, 5.672),
    (1280, 1280): (4.364, 4.459),
    (1536, 1024): (4.199, 4.281),
    (1536, 1536): (6.179, 6.396),
}


@dataclass(frozen=True)
class Convolution:
    """One published convolution: `whole` if the figure is the peak with input and output, else one allocation of it."""

    issue: int
    shape: tuple[int, ...]
    outputs: int
    dtype: torch.dtype
    padding: int
    published: float
    whole: bool


CONVOLUTIONS = (
    Convolution(128947, (1, 256, 5, 1090, 1922), 64, torch.float32, 0, 161.37, whole=False),
    Convolution(95024, (1, 64, 362, 370, 251), 32, torch.float16, 1, 108.21, whole=False),
    Convolution(132300, (1, 3, 24, 740, 1316), 128, torch.bfloat16, 1, 9.26, whole=True),
    Convolution(136479, (1, 128, 256, 256, 256), 128, torch.float16, 1, 108.00, whole=False),
    Convolution(95024, (1, 64, 361, 370, 251), 32, torch.float16, 1, 12.874233344e9 / GIB, whole=True),
)

# "GB" there are those that nvidia-smi shows, so GiB.
MAISI = {
    (256, 256, 128): 5,
    (256, 256, 256): 8,
    (512, 512, 128): 12,
    (512, 512, 256): 21,
    (512, 512, 512): 39,
    (512, 512, 768): 58,
}


def predict_qwen(height: int, width: int, is_decode: bool) -> tuple[float, float]:
    """Return what one image allocates, with the weights, and what it reserves beyond them."""
    with emulated() as mode:
        network = built_in_half(QwenImageVae)
        with tracked(mode) as tracker, torch.no_grad():
            tracker.adopt(network.parameters(), "parameters")
            loaded = len(tracker.trace)
            if is_decode:
                network.decode(torch.zeros(1, LATENT_CHANNELS, 1, height // 8, width // 8, dtype=torch.float16))
            else:
                network.encode(torch.zeros(1, 3, 1, height, width, dtype=torch.float16))
    sizes, limits = [record.nbytes for record in tracker.allocations], AllocatorLimits()
    before, whole = replay(tracker.trace[:loaded], sizes, limits), replay(tracker.trace, sizes, limits)
    return whole.peak_allocated / GIB, (whole.peak_reserved - before.reserved) / GIB


def built_in_half(build: Callable[[], nn.Module]) -> Any:
    """Return a network with fp16 weights; fake weights cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def predict_convolution(row: Convolution) -> float:
    """Return the figure that was published for one convolution."""
    with emulated() as mode:
        weight = torch.zeros(row.outputs, row.shape[1], 3, 3, 3, dtype=row.dtype)
        x = torch.zeros(row.shape, dtype=row.dtype)
        with MemoryTracker(fake=mode, cudnn=OLD_CUDNN) as tracker, torch.no_grad():
            tracker.adopt([x, weight], "inputs")
            nn.functional.conv3d(x, weight, padding=row.padding)
    return (tracker.peak["device"] if row.whole else tracker.workspace) / GIB


def predict_maisi(grid: tuple[int, ...]) -> float:
    """Return what one step of MAISI's diffusion network allocates: batch 1, fp16 autocast, Adam."""
    with emulated() as mode:
        unet, _ = maisi_networks(is_rflow=True)
        with tracked(mode) as tracker:
            tracker.adopt(unet.parameters(), "parameters")
            num_parameters = sum(p.numel() for p in unet.parameters())
            x = torch.zeros(1, 4, *(axis // 4 for axis in grid))
            with torch.autocast("cpu", torch.float16):
                labels, spacing = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3)
                y = unet(x, torch.zeros(1), class_labels=labels, spacing_tensor=spacing)
            nn.functional.mse_loss(y.float(), x).backward()
    # Adam's two states and the gradients; the parameters are in the peak.
    return (tracker.peak["device"] + 12 * num_parameters) / GIB
