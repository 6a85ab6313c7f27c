"""Run any piece of code under the tracker, on fake or real tensors, with CUDA's autocast rules or the CPU's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memory.predict.cuda_autocast import cuda_autocast_rules
from memory.predict.tracker import MemoryTracker
from models.lean import checkpointing


@contextmanager
def emulated(fake: bool = True, cuda: bool = True) -> Iterator[FakeTensorMode | None]:
    """Emulate a GPU on the CPU inside the block, where networks must be built; yield the mode for `tracked`.

    fake: tensors hold no data, so size costs nothing. cuda: CPU tensors get the dtypes and copies they would get on a
    GPU.
    """
    with ExitStack() as stack:
        mode = None
        if fake:
            mode = stack.enter_context(FakeTensorMode())
            mode.cache_enabled = False  # `KnownResults` remembers the same results at a fraction of the cost
        if cuda:
            stack.enter_context(cuda_autocast_rules())
        yield mode


@contextmanager
def tracked(mode: FakeTensorMode | None, cuda: bool = True) -> Iterator[MemoryTracker]:
    """Yield a tracker that records everything in the block and counts offloaded tensors as host memory."""
    with MemoryTracker(cuda=cuda, fake=mode) as tracker, _offloads_counted_by(tracker):
        yield tracker


@contextmanager
def _offloads_counted_by(tracker: MemoryTracker) -> Iterator[None]:
    """Tell the tracker which tensors our offloading puts on the host; on a CPU nothing else distinguishes them."""
    empty_on_host = checkpointing.empty_on_host

    def counted_empty_on_host(tensor: Tensor) -> Tensor:
        with tracker.on_host():
            return empty_on_host(tensor)

    checkpointing.empty_on_host = counted_empty_on_host
    try:
        yield
    finally:
        checkpointing.empty_on_host = empty_on_host


def measure_peak(function: Callable[[MemoryTracker], Any], fake: bool = True, cuda: bool = True) -> MemoryTracker:
    """Run `function(tracker)` and return the tracker; `tracker.peak["device"]` is the peak in bytes.

    `function` must build its networks itself; it may pass them to `tracker.name_modules` and `tracker.adopt`.
    """
    with emulated(fake, cuda) as mode, tracked(mode, cuda) as tracker:
        function(tracker)
    return tracker
