"""How a device computes: precision, memory layout, and what its libraries choose and keep."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from runtime.observer import memory_observer
from settings import DeviceSettings

ONEDNN_LIMIT = "ONEDNN_MAX_CPU_ISA"
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_SMALL = ":4096:2:16:8"  # KiB and how often: torch's own choice for most GPUs, ample for products as small as ours
_SET_BY_MONAI = ":4096:8"  # on import, unless the user has set the variable

Network = TypeVar("Network", bound=nn.Module)
MemoryFormat = Literal["auto", "contiguous", "channels_last"]


class Precision:
    """Autocast and gradient scaling for one device, from the settings; also chooses CUDA's algorithms.

    `has_bfloat16` is what all ranks agreed on for `amp_dtype: auto`; without it the device decides.
    """

    def __init__(self, settings: DeviceSettings, device: torch.device, has_bfloat16: bool | None = None) -> None:
        self.device = device
        self.dtype: torch.dtype | None = None
        if settings.is_half(on_cpu=device.type == "cpu"):
            if settings.amp_dtype != "auto":
                has_bfloat16 = settings.amp_dtype == "bfloat16"
            elif has_bfloat16 is None:
                has_bfloat16 = computes_bfloat16(device)
            self.dtype = torch.bfloat16 if has_bfloat16 else torch.float16
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


def cublas_config() -> str:
    """Return the sizes of the workspaces that cuBLAS is to use: the user's from the environment, or small ones.

    MONAI would have it keep 32 MiB for each thread, a tenth of our leanest steps. Whether the user asked for the same
    cannot be told, so that counts as MONAI's.
    """
    found = os.environ.get(CUBLAS_WORKSPACE, "")
    return _SMALL if found in ("", _SET_BY_MONAI) else found


def limit_cublas() -> None:
    """Have cuBLAS use `cublas_config()`; torch reads it at the first matrix product."""
    os.environ[CUBLAS_WORKSPACE] = cublas_config()


def cublas_bytes() -> int:
    """Return what each thread that multiplies matrices on a GPU keeps; torch replaces a text without sizes likewise."""
    sizes = re.findall(r":(\d+):(\d+)", cublas_config()) or re.findall(r":(\d+):(\d+)", _SMALL)
    return sum(int(kib) * int(count) for kib, count in sizes) << 10


def move(network: Network, device: torch.device, memory_format: MemoryFormat | None = None) -> Network:
    """Move a network to `device` in place, unless it is already there, and return it.

    A memory format, which only our own networks take, also sets its layout; `auto` is the fastest one.
    `Module.to` replaces every parameter even if none has to move. Memory prediction builds networks from fake
    parameters, and torch cannot replace those.
    """
    if any(tensor.device != device for tensor in (*network.parameters(), *network.buffers())):
        network.to(device)
    if memory_format is not None:
        own: Any = network
        before = list(network.parameters())
        layouts = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}
        own.set_layout(own.fastest_layout if memory_format == "auto" else layouts[memory_format])
        copies = [new for old, new in zip(before, network.parameters(), strict=True) if new is not old]
        memory_observer().weights_copied(copies)
    return network
