"""Read the memory of this process and its device: current use, and the peak since the last reading."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import torch

from memory.predict.prediction import GIB

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryReadings:
    """Readings of the training device: the allocator of a GPU, or the resident memory of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._earlier_peak = 0
        self._reset()

    def read(self) -> dict[str, float]:
        """Return the readings in GiB by metric name, and start a new interval for the peak."""
        if self.device.type == "cuda":
            values = {
                "memory_allocated_gib": torch.cuda.memory_allocated(self.device),
                "memory_reserved_gib": torch.cuda.memory_reserved(self.device),
                "memory_peak_gib": max(self._earlier_peak, self.step_peak_bytes()),
            }
        else:
            rss = psutil.Process().memory_info().rss
            values = {"host_memory_gib": rss, "host_memory_peak_gib": resident_peak_bytes()}
        self._reset()
        return {name: round(value / GIB, 4) for name, value in values.items()}

    def start_step(self) -> None:
        """Let `step_peak_bytes` count from here; the readings keep the peak from before."""
        if self.device.type == "cuda":
            self._earlier_peak = max(self._earlier_peak, self.step_peak_bytes())
            torch.cuda.reset_peak_memory_stats(self.device)

    def step_peak_bytes(self) -> int:
        """Return the peak allocated on the GPU since `start_step`, or the last reading if that was later."""
        return torch.cuda.max_memory_allocated(self.device)

    def _reset(self) -> None:
        self._earlier_peak = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_resident_peak()


def device_bytes(device: torch.device) -> int:
    """Return the memory of the GPU, or on a CPU the memory that this process can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return available if limit == resource.RLIM_INFINITY else min(available, limit)


def resident_peak_bytes() -> int:
    """Return the peak resident memory of this process since the last reset, or since its start."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_resident_peak() -> bool:
    """Start a new interval for `resident_peak_bytes`; return whether the system allows it."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
