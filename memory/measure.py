"""Run any piece of code under the tracker, on fake or real tensors, under CUDA's rules or the CPU's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memory.cuda_autocast import cuda_autocast_rules
from memory.tracker import MemoryTracker
from models import checkpointing


@contextmanager
def tracked(fake: bool = True, cuda: bool = True) -> Iterator[MemoryTracker]:
    """Yield a tracker of all that happens in the block.

    fake: tensors without data, so that any size costs nothing; build the networks inside the block.
    cuda: the dtypes and copies of a GPU, though all tensors are on the CPU. What offloading copies is host memory.
    """
    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode())
        if cuda:
            stack.enter_context(cuda_autocast_rules())
        tracker = stack.enter_context(MemoryTracker(cuda=cuda))
        empty_on_host = checkpointing.empty_on_host

        def counted_empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
            with tracker.on_host():
                return empty_on_host(tensor)

        stack.enter_context(mock.patch.object(checkpointing, "empty_on_host", counted_empty_on_host))
        yield tracker


def measure_peak(function: Callable[[MemoryTracker], Any], fake: bool = True, cuda: bool = True) -> MemoryTracker:
    """Run `function(tracker)` under `tracked` and return the tracker; `tracker.peak["device"]` is the peak in bytes.

    `function` builds its networks itself; it may call `tracker.name_modules` and `tracker.adopt` on them.
    """
    with tracked(fake, cuda) as tracker:
        function(tracker)
    return tracker
