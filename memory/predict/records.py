"""What the tracker writes down: storages, floating-point operations, and the work of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from memory.kernels.timing import WorkPart

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


WorkKey = tuple[str, tuple[int, ...], str]
"""The kind of an operator, and the shape and dtype of its first tensor."""


@dataclass(slots=True)
class Flops:
    """Floating-point operations of a step by purpose."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0
    attention: int = 0  # attention's part of the three above

    @property
    def total(self) -> int:
        """Return the sum of forward, backward and recomputation."""
        return self.forward + self.backward + self.recompute

    def add(self, other: Flops, times: int) -> None:
        """Add those of another part, so many times."""
        self.forward += times * other.forward
        self.backward += times * other.backward
        self.recompute += times * other.recompute
        self.attention += times * other.attention


def combined(parts: Iterable[tuple[float, Mapping[WorkKey, Work]]]) -> dict[WorkKey, Work]:
    """Return the sum of several amounts of work, each so many times."""
    total: dict[WorkKey, Work] = {}
    for times, work in parts:
        for key, done in work.items():
            known = total.setdefault(key, Work())
            known.nbytes += round(times * done.nbytes)
            known.flops += round(times * done.flops)
            known.kernels += round(times * done.kernels)
    return total


def work_parts(
    work: Mapping[WorkKey, Work], level_of: Callable[[tuple[int, ...]], int | None] = lambda _: None, times: int = 1
) -> list[WorkPart]:
    """Return work by kind, level and precision, all of it `times` times; `level_of` gives the level of a shape."""
    sums: dict[tuple[str, int | None, bool], Work] = {}
    for (kind, shape, dtype), done in work.items():
        total = sums.setdefault((kind, level_of(shape), dtype in ("torch.bfloat16", "torch.float16")), Work())
        total.nbytes += done.nbytes * times
        total.flops += done.flops * times
        total.kernels += done.kernels * times
    return [WorkPart(*key, total.nbytes, total.flops, total.kernels) for key, total in sums.items()]
