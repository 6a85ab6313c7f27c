"""The operators that a step calls, by class, and the time that they take on this machine's CPU.

How fast a CPU computes depends on the operator, its channels, its kernel and its size far more than on a peak. So calls
that differ little in size form a class, one call of each class is made with real tensors, and the others take as much
longer as they compute or move more. The classes expected to take longest are measured first, until the time limit; the
others are assumed to be as fast as measured operators of their kind. The overhead of a call is measured too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from memory.kernels.operators import Kind, kind_of

GUESSED_FLOPS, GUESSED_BYTES = 2e10, 4e9
"""A second's worth of each on one core, to decide what is measured first."""
REPEATS = 3
TINY_STEPS = 20
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)


@dataclass(frozen=True)
class _Blank:
    """What a tensor is without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def fill(self) -> Tensor:
        size = 1 + sum((axis - 1) * step for axis, step in zip(self.shape, self.stride, strict=True))
        flat = torch.zeros(max(0, size), dtype=self.dtype)
        return (flat.normal_() if self.dtype.is_floating_point else flat).as_strided(self.shape, self.stride)


@dataclass(slots=True)
class CallClass:
    """Calls of one operator on tensors of nearly one size: one of them, and the work of all."""

    func: Any
    args: Any
    kwargs: Any
    cost: float
    total: float
    times: float = 1


class Calls:
    """Every call of a step, by class; `number` also counts views, which have no kernel."""

    def __init__(self) -> None:
        self.classes: dict[Any, CallClass] = {}
        self.number: float = 0

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flops: int, nbytes: int) -> None:
        """Count one call."""
        cost = max(flops / GUESSED_FLOPS, nbytes / GUESSED_BYTES)
        key = (func, _signature((args, tuple(kwargs.items()))))
        known = self.classes.get(key)
        if known is None:
            blank_args, blank_kwargs = tree_map_only(Tensor, _blank, (args, kwargs))
            self.classes[key] = CallClass(func, blank_args, blank_kwargs, cost, cost)
        else:
            known.total += cost
            known.times += 1

    def add_all(self, other: Calls, times: float) -> None:
        """Count the calls of another part of a run, so many times."""
        self.number += times * other.number
        for key, more in other.classes.items():
            known = self.classes.setdefault(key, replace(more, total=0.0, times=0.0))
            known.total += times * more.total
            known.times += times * more.times

    def seconds(self, allowed_seconds: float = math.inf, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return the time of all calls on this machine, from measuring for at most about `allowed_seconds`."""
        return seconds_of_parts({"": self}, {"": 1.0}, allowed_seconds, clock)[""]


def seconds_of_parts(
    parts: Mapping[str, Calls],
    times: Mapping[str, float],
    allowed_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    overhead: float = 0.0,
) -> dict[str, float]:
    """Return the time of each part of a run on this machine; `times` says how often each happens.

    A class that several parts have is measured once. What takes longest over the whole run is measured first.
    overhead: what each call takes besides its kernel, if it has one.
    """
    end = time.perf_counter() + allowed_seconds
    whole = Calls()
    for name, calls in parts.items():
        whole.add_all(calls, times[name])
    measured: dict[Any, float] = {}
    kinds: dict[Kind, list[float]] = {}
    for key, known in sorted(whole.classes.items(), key=lambda item: -item[1].total):
        if (REPEATS + 1) * known.cost < end - time.perf_counter():
            measured[key] = seconds = _measure(known, clock)
            sums = kinds.setdefault(kind_of(known.func), [0.0, 0.0])
            sums[0] += seconds * known.total / max(known.cost, 1e-12)
            sums[1] += known.total
    every = [sum(column) for column in zip(*kinds.values(), strict=True)] if kinds else [1.0, 1.0]

    def of_class(key: Any, known: CallClass) -> float:
        if key in measured:
            # Calls that compute and move nothing worth counting take their time as often as they are called.
            cost = whole.classes[key].cost
            return measured[key] * (known.total / cost if cost else known.times)
        spent, guessed = kinds.get(kind_of(known.func), every)
        return known.total * spent / max(guessed, 1e-12)

    kernels = {name: sum(of_class(*item) for item in calls.classes.items()) for name, calls in parts.items()}
    return {name: seconds + parts[name].number * overhead for name, seconds in kernels.items()}


def call_overhead(clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that Python, modules and autograd take for each call of a step, besides its kernel.

    That is the time of calls on a few voxels, forward and backward, whose kernels have next to nothing to do.
    """
    blocks = [layer for _ in range(8) for layer in (nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv3d(4, 4, 3, padding=1))]
    network, x = nn.Sequential(*blocks), torch.zeros(1, 4, 4, 4, 4)
    with _Counter() as counter:
        network(x).sum().backward()
    start = clock()
    for _ in range(TINY_STEPS):
        network(x).sum().backward()
    return (clock() - start) / TINY_STEPS / counter.number


class _Counter(TorchDispatchMode):
    """Counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def _blank(tensor: Tensor) -> _Blank:
    return _Blank(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _signature(value: Any) -> Any:
    """Return what decides the class of a call: dtypes, channels and layouts exactly, voxels roughly."""
    if isinstance(value, Tensor):
        lead, rest = (value.shape[:2], value.shape[2:]) if value.dim() > 2 else ((), value.shape)
        size = round(math.log2(max(1, math.prod(rest))))
        return (value.dtype, value.dim(), tuple(lead), size, value.dim() > 2 and value.stride(1) == 1)
    if isinstance(value, (list, tuple)):
        return tuple(_signature(part) for part in value)
    return value if isinstance(value, _PLAIN) else type(value)


def _measure(known: CallClass, clock: Callable[[], float]) -> float:
    """Return the least time of some calls; the first one is not counted, because kernels are prepared in it."""
    args, kwargs = tree_map(_filled, (known.args, known.kwargs))
    found = math.inf
    with torch.no_grad():
        for number in range(REPEATS + 1):
            start = clock()
            known.func(*args, **kwargs)
            if number:
                found = min(found, clock() - start)
    return found


def _filled(value: Any) -> Any:
    return value.fill() if isinstance(value, _Blank) else value
