"""How much host memory the levels take that keep their volumes there, before any of it is taken."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from models.autoencoder import LeanAutoencoder, build_autoencoder
from models.lean.rows import GIB, TrainingSpace, check_host_bytes
from runtime.observer import memory_observer
from runtime.precision import Precision
from settings import AutoencoderSettings

log = logging.getLogger(__name__)


def offloaded_bytes(s: AutoencoderSettings, batch_size: int, grid: Sequence[int], precision: Precision) -> int:
    """Return the host memory of a training step's offloaded levels, from a step on tensors that hold no data.

    Slabs as large as the volume take the same memory on the host as thin ones.
    """
    t = s.training
    host = TrainingSpace(sys.maxsize, is_pinned=precision.device.type == "cuda")
    plain = {"use_gradient_checkpointing": False, "use_gradient_checkpointing_offload": False, "offload_levels": 0}
    with FakeTensorMode(), torch.autocast("cpu", precision.dtype or torch.bfloat16, precision.dtype is not None):
        model = build_autoencoder(s.model_copy(update={"training": t.model_copy(update=plain)}))
        assert isinstance(model, LeanAutoencoder), "only lean levels can be in host memory"
        model.offload_levels(t.offload_levels, max(grid), t.nests_checkpoints, host)
        if not t.trains_encoder:
            model.freeze_encoder()
        reconstruction, *_ = model(torch.zeros(batch_size, s.in_channels, *grid))
        reconstruction.mean().backward()
    return host.taken


def announce_offloaded(s: AutoencoderSettings, batch_size: int, grid: Sequence[int], precision: Precision) -> None:
    """Log how much host memory a step's offloaded levels take; raise `HostMemoryError` if the host has less."""
    free, needed = memory_observer().free_host_bytes(), offloaded_bytes(s, batch_size, grid, precision)
    check_host_bytes(needed, free)
    text = "memory: the %d highest levels of the autoencoder take %.1f GiB of host memory; %.1f GiB are free"
    log.info(text, s.training.offload_levels, needed / GIB, free / GIB)
