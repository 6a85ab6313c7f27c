"""The precision of a step, float32, bfloat16, or float16 with a gradient scaler, and CUDA's choice of algorithms."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from settings import DeviceSettings

ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"


class Precision:
    """Autocast and gradient scaling for one device, from the settings; also chooses CUDA's algorithms.

    `has_bfloat16` is what all ranks agreed on for `amp_dtype: auto`; without it the device decides.
    """

    def __init__(self, settings: DeviceSettings, device: torch.device, has_bfloat16: bool | None = None) -> None:
        self.device = device
        self.dtype = _choose_dtype(settings, device, has_bfloat16)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)

    @property
    def name(self) -> str:
        """Return the name of the precision as it appears in the log."""
        return str(self.dtype or torch.float32).removeprefix("torch.")

    @property
    def skips_overflows(self) -> bool:
        """Return whether a step with a non-finite gradient is skipped (float16) instead of raising an error."""
        return self.scaler.is_enabled()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for running the networks."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Run backward on the loss, scaled if the precision needs it."""
        self.scaler.scale(loss).backward()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty if the scaler is off."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state."""
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def onednn_limit(settings: DeviceSettings) -> str:
    """Return the instructions that oneDNN may use on a CPU: what ONEDNN_MAX_CPU_ISA says, else what is safe.

    In 16 bits that is AVX2, which has no such kernels: AMX is an illegal instruction on some machines that report it,
    and the AVX-512 weight gradient of a one-channel convolution reads uninitialised memory.
    """
    return os.environ.get(ONEDNN_LIMIT) or ("AVX2" if settings.is_half(on_cpu=True) else "AVX512_CORE_BF16")


def computes_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes bfloat16 fast.

    GPUs before Ampere emulate it slowly, and their attention falls back to one that builds its N x N matrix.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _choose_dtype(settings: DeviceSettings, device: torch.device, has_bfloat16: bool | None) -> torch.dtype | None:
    if not settings.is_half(on_cpu=device.type == "cpu"):
        return None
    if settings.amp_dtype == "auto":
        has_bfloat16 = computes_bfloat16(device) if has_bfloat16 is None else has_bfloat16
        return torch.bfloat16 if has_bfloat16 else torch.float16
    return torch.bfloat16 if settings.amp_dtype == "bfloat16" else torch.float16
