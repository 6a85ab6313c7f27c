"""Which process this is, on which device, and how processes work together; one process is the simple case of many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from settings import ConfigError, DeviceSettings, Problem

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Process:
    """One of the processes that train together, and its device."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    control: Any = field(default=None, repr=False)  # a gloo group: decisions on the host do not wait for the GPU

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and logs."""
        return self.rank == 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network so that backward averages its gradients over all processes."""
        if self.world_size == 1:
            return network
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            network, device_ids=device_ids, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        if self.world_size == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return bool(value)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a host tensor over all processes."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier(group=self.control)

    def from_first(self, value: Any) -> Any:
        """Return the first process's value in every process."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


def synchronised(network: nn.Module, is_last: bool) -> Any:
    """Return the context for a forward and backward: gradients travel only on the last accumulation pass."""
    if isinstance(network, DistributedDataParallel) and not is_last:
        return network.no_sync()
    return nullcontext()


def choose_device(settings: DeviceSettings, local_rank: int = 0) -> torch.device:
    """Return the device to train on; raise `ConfigError` when the settings ask for a GPU that is not there."""
    if settings.type == "cpu" or (settings.type == "auto" and not torch.cuda.is_available()):
        # On a CPU oneDNN's 16-bit kernels cannot be trusted: AMX is an illegal instruction on machines that announce
        # it, and the AVX-512 weight gradient of a one-channel convolution reads memory it never wrote. AVX2 has none.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2" if settings.mixed_precision else "AVX512_CORE_BF16")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        found = "cuda, but torch sees no GPU"
        raise ConfigError([Problem("device.type", found, "", "set device.type=cpu, or check the driver")])
    if local_rank >= torch.cuda.device_count():
        found = f"process {local_rank} of this machine, which has {torch.cuda.device_count()} GPUs"
        raise ConfigError([Problem("device.type", found, "", "start torchrun with fewer processes a machine")])
    return torch.device("cuda", local_rank)


@contextmanager
def processes(settings: DeviceSettings) -> Iterator[Process]:
    """Join the processes that torchrun started, or be the only one; leave cleanly at the end.

    Sets the CUDA allocator's options first: they are read when CUDA starts.
    """
    if settings.allocator:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings.allocator
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(settings, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        yield Process(device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_TIMEOUT, device_id=device if device.type == "cuda" else None)
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        yield Process(device, rank, local_rank, world_size, control)
    finally:
        dist.destroy_process_group()
