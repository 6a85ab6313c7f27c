"""Track every tensor storage of a step from its allocation to its release.

Works on real and fake tensors: a fake step allocates no memory but creates and releases the same storages in the same
order. The result is the peak, the storages alive at the peak, and the trace that `memory.predict.allocator` replays.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from memory.kernels import operators
from memory.kernels.convolutions import (
    ConvolutionMemory,
    convolution_memory,
    cpu_convolution_passes,
    cudnn_version,
    trial_key,
)
from memory.kernels.gpus import BUS_COPY, LAYOUT, NARROW_ATTENTION, NARROW_CHANNELS
from memory.kernels.operators import Done, Work, attention_workspaces, channel_sum_bytes, partial_sum_bytes, sum_bytes
from memory.predict.known_results import CPU, KnownResults, is_added_in_place, key_of, plausible_value
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


Place = Literal["device", "host"]
WORKSPACE = "workspace"
"""Stands where a tensor has its dtype."""


@dataclass(slots=True)
class Allocation:
    """One storage: its size, the operator, phase and module that allocated it, and whether it was released."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    phase: str
    module: str
    in_backward: bool
    place: Place
    category: str = ""  # parameters, gradients, optimizer, ema, inputs or workspaces; "" for tensors of the step
    released: bool = False


@dataclass(frozen=True)
class StepEvents:
    """Where a step is in a trace: its first event, the first one that moves weights, and the first one after it."""

    start: int
    update: int
    end: int


class _ModuleNames:
    """Knows the named modules that are `running`, the innermost last, and which one each backward node belongs to."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._of_node: dict[int, str] = {}

    def follow(self) -> list[RemovableHandle]:
        """Follow the calls of all modules until the handles are removed."""
        left = register_module_forward_hook(self._leave, always_call=True)
        return [register_module_forward_pre_hook(self._enter), left]

    def add(self, name: str, root: nn.Module) -> None:
        """Name a module, and by their paths those inside it."""
        for path, module in root.named_modules():
            self._names[module] = f"{name}.{path}" if path else name

    def note_operator(self) -> None:
        """Remember which module the operator belongs to that forward runs now."""
        if self.running:
            # An operator's autograd node is created just before it runs, so the newest number is this operator's.
            self._of_node[torch._C._autograd._get_sequence_nr() - 1] = self.running[-1]

    def current(self, in_backward: bool) -> str:
        """Return the module that runs now, or whose backward does; "" if it has no name."""
        if self.running:
            return self.running[-1]
        node = torch._C._current_autograd_node() if in_backward else None
        return self._of_node.get(node._sequence_nr(), "") if node is not None else ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._names:
            self.running.append(self._names[module])

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if module in self._names:
            self.running.pop()


class MemoryTracker(TorchDispatchMode):
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
        self._execute: Callable[..., Any] = (
            KnownResults(fake, cuda) if fake is not None else lambda func, args, kwargs: func(*args, **kwargs)
        )
        self._inside: dict[Any, int] = {}
        self.allocations: list[Allocation] = []
        self.trace: list[int] = []
        self.live: dict[Place, int] = {"device": 0, "host": 0}
        self.peak: dict[Place, int] = {"device": 0, "host": 0}
        self.peak_event = 0
        self.phase_peaks: dict[str, int] = {}
        self.start_counting()
        self.workspace = 0  # the largest that one convolution takes
        self.unfolded = 0  # the largest copy of a convolution that cuDNN refuses
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
        self._modules = _ModuleNames()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap `__torch_dispatch__`: nothing is compiled here, and the wrapper costs time."""
        return False

    def __enter__(self) -> "MemoryTracker":
        self._hooks = self._modules.follow()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
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

    def reset(self) -> None:
        """Reset peaks and counts; live storages stay counted."""
        self.start_counting()
        self.phase_peaks = {}
        self.peak = dict(self.live)
        self.peak_event = len(self.trace)

    def start_counting(self) -> None:
        """Set the work of kernels to zero, and the FLOPs by purpose; attention's part of them is also counted alone."""
        self.flops: Counter[str] = Counter()
        self.work: Done = {}

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not operators.is_kernel(func):
            return
        flops = operators.count_flops(func, args, out)
        first = next(operators.tensors_in((*args, out)), None)
        if first is not None:
            moved, shape = operators.traffic_bytes(func, args, kwargs, out), tuple(first.shape)
            kind = BUS_COPY if self._crosses_bus(func, args) else operators.kind_of(func)
            if kind == "attention" and shape[-1] <= NARROW_CHANNELS:
                kind = NARROW_ATTENTION
            computed = operators.computed_flops(func, args, flops)
            self.add_work(kind, shape, str(first.dtype), Work(moved, computed, operators.passes(func)))
        if flops:
            self.flops[self._purpose()] += flops
            if "scaled_dot_product" in func._overloadpacket.__name__:
                self.flops["attention"] += flops

    def add_work(self, kind: str, shape: tuple[int, ...], dtype: str, more: Work) -> None:
        """Add work of one kind on tensors of one shape."""
        self.work.setdefault((kind, shape, dtype), Work()).add(more)

    def _crosses_bus(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operator copies from the device to host memory or back."""
        if func is not aten.copy_.default or not self.live["host"]:
            return False
        ends = [self._alive.get(tensor.untyped_storage()._cdata) for tensor in args[:2]]
        return len({"device" if end is None else self.allocations[end[0]].place for end in ends}) == 2

    def _purpose(self) -> str:
        """Return what the operator runs for.

        Backward itself runs with gradients disabled; only a checkpoint enables them, to recompute its forward.
        """
        if not self._in_backward:
            return "forward"
        return "recompute" if torch.is_grad_enabled() or self._modules.running else "backward"

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
        self._count(func, args, kwargs, out)
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
        else:
            for nbytes in cpu_convolution_passes(func, args, out):
                self._pass_through(nbytes, category=CONVOLUTION_WORKSPACES)
                self.workspace = max(self.workspace, nbytes)
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
                kind: str | None = LAYOUT if result.dim() == 5 else "copy"  # cuDNN copies images as fast as torch does
                if result.dtype == torch.float32 and not memory.unfolded:
                    kind = None  # the share of TF32's peak, as fitted, has the time of these copies in it
                self._pass_through(workspace, category=CONVOLUTION_WORKSPACES, kind=kind)
                self._let_go(held)
        self._let_go(copies)
        if any(result is not None for result in results[2:]):
            self._allocate_results(results[2])
            self._pass_through(channel_sum_bytes(args[0]))
        copied = sum(memory.copies) + max(memory.pass_copies, default=0)
        self.workspace = max(self.workspace, copied + max(memory.passes, default=0))
        self.unfolded = max(self.unfolded, memory.unfolded)

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

    def _pass_through(self, *sizes: int, category: str = LIBRARY_WORKSPACES, kind: str | None = "copy") -> None:
        """Count memory that a kernel allocates and frees before it returns; ~n stands where it frees the nth of it."""
        held: list[int] = []
        for size in sizes:
            if size < 0:
                self._let_go([held[~size]])
            held += self._hold(max(0, size), category=category, kind=kind)
        self._let_go([index for index in held if not self.allocations[index].released])

    def _hold(self, *sizes: int, category: str = LIBRARY_WORKSPACES, kind: str | None = "copy") -> list[int]:
        """Count memory that a kernel allocates for itself; unless `kind` is None, it costs a write and a read."""
        wanted = [size for size in sizes if size]
        if kind is not None:
            for size in wanted:
                self.add_work(kind, (size,), WORKSPACE, Work(2 * size, 0, 0))
        return [self._record(size, (size,), WORKSPACE, category) for size in wanted]

    def _keep_from_the_start(self, nbytes: int, library: str) -> None:
        """Count memory that a library takes once and keeps, as if an earlier step had taken it."""
        self._op = library
        index = self._record(nbytes, (nbytes,), WORKSPACE, LIBRARY_WORKSPACES, note_peak=False)
        self.allocations[index].module = ""
        self.kept.add(index)
        self.peak["device"] += nbytes
        self.phase_peaks = {name: peak + nbytes for name, peak in self.phase_peaks.items()}

    def _record(
        self, nbytes: int, shape: tuple[int, ...], dtype: str, category: str = "", note_peak: bool = True
    ) -> int:
        index, phase = len(self.allocations), current_phase()
        op, module = self._op.removeprefix("aten."), self._modules.current(self._in_backward)
        place: Place = "device" if category else self._place
        where = (phase, module, self._in_backward, place, category)
        self.allocations.append(Allocation(nbytes, shape, dtype.removeprefix("torch."), op, *where))
        self.trace.append(index)
        self.live[place] += nbytes
        if note_peak:
            level = self.live["device"]
            if level > self.peak["device"]:
                self.peak["device"] = level
                self.peak_event = len(self.trace)
            self.peak["host"] = max(self.peak["host"], self.live["host"])
            self.phase_peaks[phase] = max(level, self.phase_peaks.get(phase, 0))
        return index

    def _release(self, key: int, _: Any) -> None:
        self._let_go([self._alive.pop(key)[0]])

    def _let_go(self, held: list[int]) -> None:
        for index in held:
            record = self.allocations[index]
            record.released = True
            self.trace.append(~index)
            self.live[record.place] -= record.nbytes


class _Pieces(MemoryObserver):
    """Lets our kernels cut fake volumes into pieces of so many values."""

    def __init__(self, values: int) -> None:
        self.values = values

    def piece_values(self) -> int:
        return self.values
