"""What a step tells whoever follows its memory: the phase that runs, and what tensors alone do not show.

Without an observer, such as the memory predictor, only the name of the phase has an effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from runtime.host_memory import available_host_bytes


class MemoryObserver:
    """Called at the places that matter; a subclass overrides those that it wants to hear of."""

    def host_allocation(self) -> AbstractContextManager[None]:
        """Return a context for allocating host memory, into which a tensor of the device will be moved."""
        return nullcontext()

    def free_host_bytes(self) -> int:
        """Return this rank's share of the host memory that is free."""
        return available_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def emulates_gpu(self) -> bool:
        """Return whether fake tensors stand for those of a GPU, and kernels are to be chosen as for one."""
        return False

    def weights_copied(self, weights: Sequence[Tensor]) -> None:
        """Take note of weights that were copied into another memory format, on their device."""

    def piece_values(self) -> int | None:
        """Return how many values kernels convert to full precision at once; None: what suits their device."""
        return None


_observer: ContextVar[MemoryObserver] = ContextVar("observer", default=MemoryObserver())  # noqa: B039 it has no state


def memory_observer() -> MemoryObserver:
    """Return the observer of this thread; one that does nothing unless `observed_by` has set another."""
    return _observer.get()


def runs_on_cpu(x: Tensor) -> bool:
    """Return whether the kernels of a CPU compute `x`; fake tensors of a predictor may stand for those of a GPU."""
    return x.is_cpu and (type(x) is Tensor or not memory_observer().emulates_gpu())


@contextmanager
def observed_by(observer: MemoryObserver) -> Iterator[None]:
    """Let an observer follow what runs inside the block."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


_current = "set-up"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name the phase that runs inside; after an error the name stays, so that a report can show where it happened."""
    global _current
    outer, _current = _current, name
    with torch.profiler.record_function(name):
        yield
    _current = outer


def current_phase() -> str:
    """Return the name of the innermost phase, or of the phase that failed."""
    return _current
