"""Track every tensor storage of a step from its allocation to its release.

Works on real and fake tensors: a fake step allocates no memory but creates and releases the same storages in the same
order. The result is the peak, the storages alive at the peak, and the trace that `memory.predict.allocator` replays.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memory.kernels import operators
from memory.kernels.convolutions import ConvolutionMemory, convolution_memory, cudnn_version, trial_key
from memory.kernels.cpu_convolutions import cpu_convolution_memory
from memory.kernels.reductions import attention_workspaces, channel_sum_bytes, partial_sum_bytes, sum_bytes
from memory.kernels.timing import LAYOUT
from memory.predict.known_results import CPU, KnownResults, is_added_in_place, key_of, plausible_value
from memory.predict.records import (
    WORKSPACE,
    Allocation,
    Done,
    ModuleNames,
    Place,
    Purpose,
    StepEvents,
    Work,
    WorkCounter,
)
from models.lean.norm.torch_kernels import CPU_PIECE_VALUES, gpu_piece_values
from runtime.observer import MemoryObserver, current_phase, observed_by
from runtime.precision import cublas_bytes

aten = torch.ops.aten
_RESULT_FIRST = (torch.ops.lean.group_norm.default, torch.ops.lean.group_norm_backward.default)
"""Those of our operators that allocate their result before they sum."""
_HOST = torch.device("meta")  # stands for the host, so that a copy to the CPU, which stands for the GPU, is one
_EMULATED_GPU = torch.device("meta")  # torch built without CUDA refuses to handle "cuda"
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

CONVOLUTION_WORKSPACES, LIBRARY_WORKSPACES = "convolution workspaces", "library workspaces"
MOST_PIECES = 16
"""Of a volume on a CPU. Real kernels cut it into hundreds, which would all be alike and hold next to nothing."""


class MemoryTracker(TorchDispatchMode, WorkCounter):
    """Record the allocation and release of every storage created while the mode is active.

    `trace` holds the events in order: an allocation is its index into `allocations`, a release the complement of that
    index (`~index`). Enter it inside `FakeTensorMode` to predict, or alone to observe a real CPU step. Pass storages
    created earlier to `adopt`; otherwise they are not counted. without_triton: the memory of a GPU that cannot run
    Triton, whose norms need copies; 0 for other devices.
    """

    def __init__(
        self,
        cuda: bool = True,
        fake: FakeTensorMode | None = None,
        cudnn: int | None = None,
        without_triton: int = 0,
    ) -> None:
        super().__init__()
        self.cuda = cuda
        self.without_triton = without_triton if cuda else 0
        self.cudnn = cudnn_version() if cudnn is None else cudnn
        self.fake = fake
        self.device = CPU  # where tensors say they are
        self._execute: Callable[..., Any] = KnownResults(fake, cuda) if fake is not None else _call
        self._inside: dict[Any, int] = {}
        self.allocations: list[Allocation] = []
        self.trace: list[int] = []
        self.live: dict[Place, int] = {"device": 0, "host": 0}
        self.peak: dict[Place, int] = {"device": 0, "host": 0}
        self.peak_event = 0
        self.phase_peaks: dict[str, int] = {}
        self.start_counting()
        self.workspace = 0  # the largest that one convolution takes
        self.unfolded: dict[bool, int] = {True: 0, False: 0}  # by whether cuDNN refuses the call or an older one would
        self._threads_with_cublas: set[bool] = set()
        self.step: StepEvents | None = None
        self.of_micro_batch: tuple[Counter[str], Done] = (Counter(), {})  # counted before the weights move
        self.kept: set[int] = set()  # what libraries take once
        self.benchmarks = False  # whether cuDNN tries its algorithms at the first call of each convolution
        self.benchmarked: list[int] = []  # where it does, after which torch empties its cache
        self._tried: set[Any] = set()
        self.first_gradients: dict[int, int] = {}  # by the id of their parameter
        self.updaters: list[tuple[int, set[int]]] = []  # where the allocations of each end, and its parameters
        self._waiting: set[int] = set()
        self._place: Place = "device"
        self._op, self._in_backward = "", False  # the operator that runs
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._modules = ModuleNames()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap `__torch_dispatch__`: nothing is compiled here, and the wrapper costs time."""
        return False

    def __enter__(self) -> "MemoryTracker":
        self._modules.follow()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._modules.stop()
        super().__exit__(*error)

    def name_modules(self, name: str, root: nn.Module) -> None:
        """Label allocations inside `root` with the names of its modules, prefixed with `name`."""
        self._modules.add(name, root)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count allocations inside the block as host memory, which is pinned for a GPU and the only memory of a CPU."""
        before, self._place = self._place, "host" if self.cuda else "device"
        try:
            yield
        finally:
            self._place = before

    def adopt(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of tensors; count storages from before the tracker started from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._op, self._in_backward = "adopted", False
                self._allocate(tensor, storage)
            self.allocations[self._alive[storage._cdata][0]].category = category

    def adopt_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Categorise each gradient as soon as backward stores it; of several backward passes the first one's stays."""

        def note(number: int, grad: torch.Tensor) -> None:
            self.first_gradients.setdefault(number, self._alive[grad.untyped_storage()._cdata][0])

        def mark(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.adopt([parameter.grad], "gradients")

        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(note, id(parameter)))
                parameter.register_post_accumulate_grad_hook(mark)

    @contextmanager
    def waiting_on_host(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside the block fake tensors are on the host and not counted; their copies on the device are inputs."""
        self._waiting = {tensor.untyped_storage()._cdata for tensor in tensors}
        try:
            yield
        finally:
            self._waiting = set()

    def _waits_on_host(self, tensor: Any) -> bool:
        return bool(self._waiting) and tensor.untyped_storage()._cdata in self._waiting

    @property
    def incoming(self) -> set[int]:
        """Return the gradients as the first backward pass hands them to parameters, which keep them."""
        return set(self.first_gradients.values())

    def reset(self) -> None:
        """Reset peaks and counts; live storages stay counted."""
        self.start_counting()
        self.phase_peaks = {}
        self.peak = dict(self.live)
        self.peak_event = len(self.trace)

    def alive_at_peak(self) -> list[Allocation]:
        """Return the device storages that were alive at the peak."""
        alive = set(self.kept)
        for event in self.trace[: self.peak_event]:
            if event >= 0:
                alive.add(event)
            else:
                alive.discard(~event)
        return [self.allocations[index] for index in sorted(alive) if self.allocations[index].place == "device"]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return _HOST if self._waits_on_host(args[0]) else self.device
        if self.device is not CPU and "device" in kwargs:
            kwargs["device"] = CPU
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return plausible_value(args[0].dtype)
        in_backward = torch._C._current_graph_task_id() != -1
        self._op, self._in_backward = str(func), in_backward
        has_tiles = self.cuda and func.namespace == "lean" and not self.without_triton
        tiles = partial_sum_bytes(func, args) if has_tiles else 0
        sums_first = func not in _RESULT_FIRST
        self._pass_through(tiles if sums_first else 0)
        if in_backward and self.fake is not None and is_added_in_place(func, args, kwargs):
            out = args[0]
        else:
            out = self._execute(func, args, kwargs)
        if not in_backward:
            self._modules.note_operator()
        self.count(func, args, kwargs, out, self._purpose())
        memory = convolution_memory(func, args, out, self.cudnn) if self.cuda else None
        if memory is not None:
            self._convolve(memory, func, args, out)
        else:
            self._allocate_results(out)
        if func is aten._to_copy.default and self._waits_on_host(args[0]):
            self.adopt([out], "inputs")
        if self.cuda and operators.kind_of(func) == "matrix product" and in_backward not in self._threads_with_cublas:
            self._threads_with_cublas.add(in_backward)  # forward and backward run in threads of their own
            self._keep_from_the_start(cublas_bytes(), "cuBLAS")
        if self.cuda:
            self._pass_through(*attention_workspaces(func, args), sum_bytes(func, args), 0 if sums_first else tiles)
        elif (memory := cpu_convolution_memory(func, args, out)) is not None:
            for nbytes in memory.passes:
                self._pass_through(nbytes, category=CONVOLUTION_WORKSPACES)
            self.workspace = max(self.workspace, *memory.passes, 0)
        if func.namespace == "lean" and self.fake is not None and (not self.cuda or self.without_triton):
            self._pass_through(self._held_inside(func, args, kwargs))
        return out

    def _held_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return what those of our kernels that are made of torch's hold besides arguments and results."""
        key = key_of(func, args, kwargs)
        if key not in self._inside:
            tensors = list(operators.tensors_in((*args, *kwargs.values())))
            pieces = gpu_piece_values(self.without_triton)
            if not self.cuda:
                pieces = max(CPU_PIECE_VALUES, max(tensor.numel() for tensor in tensors) // MOST_PIECES)
            with MemoryTracker(cuda=False, fake=self.fake) as inner, observed_by(_Pieces(pieces)):
                if self.cuda:  # the kernels choose by the device of their arguments
                    inner.device = _EMULATED_GPU
                inner.adopt(tensors, "inputs")
                before = inner.live["device"]
                out = func.redispatch(_CPU_KERNELS, *args, **kwargs)
            results = operators.tensors_in(out if isinstance(out, tuple) else (out,))
            kept = before + sum(part.untyped_storage().nbytes() for part in results)
            self._inside[key] = inner.peak["device"] - kept
        return self._inside[key]

    def _convolve(self, memory: ConvolutionMemory, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Count a convolution on a GPU: copies of its arguments, then a result and a workspace in each of its passes.

        The pass for the gradient of a weight makes its own copies before its result, the others after it. cuDNN tries
        its algorithms at the first pass of its kind in each thread.
        """
        passes = zip(memory.passes, memory.pass_copies or (0, 0), strict=False)
        results = out if isinstance(out, tuple) else (out,)
        copies = self._hold(*memory.copies)
        for number, result in enumerate(results[:2]):
            if result is not None:
                workspace, copied = next(passes)
                held = self._hold(copied if number else 0)
                self._allocate_results(result)
                held += self._hold(0 if number else copied)
                key = (number, self._in_backward, trial_key(func, args))
                if self.benchmarks and key not in self._tried:
                    self._tried.add(key)
                    self.benchmarked.append(len(self.trace))
                is_volume = results[number].dim() == 5  # cuDNN copies images as fast as torch does
                self._pass_through(workspace, category=CONVOLUTION_WORKSPACES, kind=LAYOUT if is_volume else "copy")
                self._let_go(held)
        self._let_go(copies)
        if any(result is not None for result in results[2:]):
            self._allocate_results(results[2])
            self._pass_through(channel_sum_bytes(args[0]))
        copied = sum(memory.copies) + max(memory.pass_copies, default=0)
        self.workspace = max(self.workspace, copied + max(memory.passes, default=0))
        self.unfolded[memory.is_unfolded] = max(self.unfolded[memory.is_unfolded], memory.unfolded)

    def _allocate_results(self, out: Any) -> None:
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._alive:
                    self._allocate(leaf, storage)

    def _allocate(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        index = self._record(storage.nbytes(), tuple(tensor.shape), str(tensor.dtype))
        key = storage._cdata
        self._alive[key] = (index, weakref.ref(storage, functools.partial(self._release, key)))

    def _pass_through(self, *sizes: int, category: str = LIBRARY_WORKSPACES, kind: str = "copy") -> None:
        """Count memory that a kernel allocates and frees before it returns; ~n stands where it frees the nth of it."""
        held: list[int] = []
        for size in sizes:
            if size < 0:
                self._let_go([held[~size]])
            held += self._hold(max(0, size), category=category, kind=kind)
        self._let_go([index for index in held if not self.allocations[index].released])

    def _hold(self, *sizes: int, category: str = LIBRARY_WORKSPACES, kind: str = "copy") -> list[int]:
        """Count memory that a kernel allocates for itself, which costs a write and a read."""
        held = []
        for size in sizes:
            if size:
                held.append(self._record(size, (size,), WORKSPACE))
                self.allocations[held[-1]].category = category
                self.add_work(kind, (size,), WORKSPACE, Work(2 * size, 0, 0))
        return held

    def _let_go(self, held: list[int]) -> None:
        for index in held:
            self._record_release(index)

    def _keep_from_the_start(self, nbytes: int, library: str) -> None:
        """Count memory that a library takes once and keeps, as if an earlier step had taken it."""
        index, here = len(self.allocations), (current_phase(), "", self._in_backward)
        record = Allocation(nbytes, (nbytes,), WORKSPACE, library, *here, "device", LIBRARY_WORKSPACES)
        self.allocations.append(record)
        self.trace.append(index)
        self.kept.add(index)
        self.live["device"] += nbytes
        self.peak["device"] += nbytes
        self.phase_peaks = {name: peak + nbytes for name, peak in self.phase_peaks.items()}

    def _record(self, nbytes: int, shape: tuple[int, ...], dtype: str) -> int:
        index = len(self.allocations)
        record = Allocation(
            nbytes=nbytes,
            shape=shape,
            dtype=dtype.removeprefix("torch."),
            op=self._op.removeprefix("aten."),
            phase=current_phase(),
            module=self._modules.current(self._in_backward),
            in_backward=self._in_backward,
            place=self._place,
        )
        self.allocations.append(record)
        self.trace.append(index)
        self.live[record.place] += nbytes
        self._note_peak()
        return index

    def _release(self, key: int, _: Any) -> None:
        self._record_release(self._alive.pop(key)[0])

    def _record_release(self, index: int) -> None:
        record = self.allocations[index]
        record.released = True
        self.trace.append(~index)
        self.live[record.place] -= record.nbytes

    def _note_peak(self) -> None:
        level = self.live["device"]
        if level > self.peak["device"]:
            self.peak["device"] = level
            self.peak_event = len(self.trace)
        self.peak["host"] = max(self.peak["host"], self.live["host"])
        phase = current_phase()
        if level > self.phase_peaks.get(phase, 0):
            self.phase_peaks[phase] = level

    def _purpose(self) -> Purpose:
        """Return what the operator runs for.

        Backward itself runs with gradients disabled; only a checkpoint enables them, to recompute its forward.
        """
        if not self._in_backward:
            return "forward"
        return "recompute" if torch.is_grad_enabled() or self._modules.running else "backward"


class _Pieces(MemoryObserver):
    """Lets our kernels cut fake volumes into pieces of so many values."""

    def __init__(self, values: int) -> None:
        self.values = values

    def piece_values(self) -> int:
        return self.values


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)
