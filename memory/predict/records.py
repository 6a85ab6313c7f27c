"""What the tracker writes down: storages, floating-point operations, the work of kernels, and which module ran."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from memory.kernels import operators
from memory.kernels.timing import BACKWARD_CONVOLUTION, NARROW_ATTENTION, NARROW_CHANNELS, WorkPart

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


@dataclass(slots=True)
class Work:
    """What the kernels of one kind did on tensors of one shape: bytes moved, FLOPs and calls."""

    nbytes: int = 0
    flops: int = 0
    kernels: int = 0

    def add(self, other: Work, times: float = 1) -> None:
        """Add other work, so many times."""
        self.nbytes += round(times * other.nbytes)
        self.flops += round(times * other.flops)
        self.kernels += round(times * other.kernels)


Purpose = Literal["forward", "backward", "recompute"]
WorkKey = tuple[str, tuple[int, ...], str]
"""The kind of an operator, and the shape and dtype of its first tensor."""
Done = dict[WorkKey, Work]
"""The work of one part of a run."""


def combined(parts: Iterable[tuple[float, Done]]) -> Done:
    """Return the sum of several amounts of work, each so many times."""
    total: Done = {}
    for times, work in parts:
        for key, done in work.items():
            total.setdefault(key, Work()).add(done, times)
    return total


def work_parts(
    work: Done, level_of: Callable[[tuple[int, ...]], int | None] = lambda _: None, times: int = 1
) -> list[dict[str, Any]]:
    """Return work by kind, level and precision, all of it `times` times; `level_of` gives the level of a shape."""
    sums: dict[tuple[str, int | None, bool], Work] = {}
    for (kind, shape, dtype), done in work.items():
        key = (kind, level_of(shape), dtype in ("torch.bfloat16", "torch.float16"))
        sums.setdefault(key, Work()).add(done, times)
    return [WorkPart(*key, total.nbytes, total.flops, total.kernels).to_json() for key, total in sums.items()]


def total_flops(flops: Mapping[str, int]) -> int:
    """Return the sum of all purposes, which attention's part is in."""
    return flops["forward"] + flops["backward"] + flops["recompute"]


class WorkCounter:
    """Counts what operators do: the work of kernels, and FLOPs by purpose, attention's part of them also alone."""

    def start_counting(self) -> None:
        """Set all counts to zero."""
        self.flops: Counter[str] = Counter()
        self.work: Done = {}

    def counted(self) -> tuple[Counter[str], Done]:
        """Return the FLOPs and the work so far, which counting goes on from."""
        return self.flops.copy(), combined([(1, self.work)])

    def count(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, purpose: Purpose
    ) -> None:
        """Count one operator."""
        if not operators.is_kernel(func):
            return
        flops = operators.count_flops(func, args, out)
        first = next(operators.tensors_in((*args, out)), None)
        if first is not None:
            moved = operators.traffic_bytes(func, args, kwargs, out)
            shape, dtype = tuple(first.shape), str(first.dtype)
            self.add_work(_kind(func, shape), shape, dtype, Work(moved, flops, operators.passes(func)))
        if flops:
            self.flops[purpose] += flops
            if "scaled_dot_product" in func._overloadpacket.__name__:
                self.flops["attention"] += flops

    def add_work(self, kind: str, shape: tuple[int, ...], dtype: str, more: Work) -> None:
        """Add work of one kind on tensors of one shape."""
        self.work.setdefault((kind, shape, dtype), Work()).add(more)


def _kind(func: torch._ops.OpOverload, shape: tuple[int, ...]) -> str:
    """Return the kind of work of an operator whose first tensor has this shape."""
    if func._overloadpacket is torch.ops.aten.convolution_backward:
        return BACKWARD_CONVOLUTION
    kind = operators.kind_of(func)
    return NARROW_ATTENTION if kind == "attention" and shape[-1] <= NARROW_CHANNELS else kind


class ModuleNames:
    """Knows the named modules that are `running`, the innermost last, and which one each backward node belongs to."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._of_node: dict[int, str] = {}
        self._hooks: list[RemovableHandle] = []

    def follow(self) -> None:
        """Follow the calls of all modules until `stop`."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Stop following."""
        for hook in self._hooks:
            hook.remove()

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
