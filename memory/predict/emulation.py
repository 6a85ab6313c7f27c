"""Run any piece of code under the tracker, on fake or real tensors, under CUDA's rules or the CPU's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memory.predict.cuda_autocast import cuda_autocast_rules
from memory.predict.tracker import MemoryTracker
from models.lean import checkpointing


@contextmanager
def emulated(fake: bool = True, cuda: bool = True) -> Iterator[FakeTensorMode | None]:
    """Set the scene for a tracker and yield what it wants to know: build the networks inside.

    fake: tensors without data, so that any size costs nothing. cuda: the dtypes and copies of a GPU, on CPU tensors.
    """
    with ExitStack() as stack:
        mode = None
        if fake:
            mode = stack.enter_context(FakeTensorMode())
            mode.cache_enabled = False  # `FakeShortcuts` remembers the same, at a tenth of the cost
            stack.enter_context(mock.patch.object(nn.Module, "to", _stay(nn.Module.to)))
        if cuda:
            stack.enter_context(cuda_autocast_rules())
        yield mode


def _stay(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Skip moves of a module to where it is: torch cannot exchange the parameters of a module for fake ones."""

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module if args == (torch.device("cpu"),) and not kwargs else original(module, *args, **kwargs)

    return to


@contextmanager
def tracked(mode: FakeTensorMode | None, cuda: bool = True) -> Iterator[MemoryTracker]:
    """Yield a tracker of all that happens in the block; what offloading copies counts as host memory."""
    with ExitStack() as stack:
        tracker = stack.enter_context(MemoryTracker(cuda=cuda, fake=mode))
        empty_on_host = checkpointing.empty_on_host

        def counted_empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
            with tracker.on_host():
                return empty_on_host(tensor)

        stack.enter_context(mock.patch.object(checkpointing, "empty_on_host", counted_empty_on_host))
        yield tracker


def measure_peak(function: Callable[[MemoryTracker], Any], fake: bool = True, cuda: bool = True) -> MemoryTracker:
    """Run `function(tracker)` and return the tracker; `tracker.peak["device"]` is the peak in bytes.

    `function` builds its networks itself; it may call `tracker.name_modules` and `tracker.adopt` on them.
    """
    with emulated(fake, cuda) as mode, tracked(mode, cuda) as tracker:
        function(tracker)
    return tracker
