"""Blocks that run in slabs, forward and backward: exact, for group statistics and sums of gradients cover all rows.

A block in slabs is one autograd function that saves its input only, on the device. Consecutive levels are one as well:
a function of a volume that fits the device to another one that does. In between, each block reads rows from host
memory and writes rows to it, and the device holds a few slabs. What a block computes from its input is computed again
wherever that takes less time than copying it to the host and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from models.lean import native
from models.lean.norm import compute_dtype, full_precision
from models.lean.norm.operators import statistics, store_statistics
from models.lean.rows import (
    HostSpace,
    HostVolume,
    NormedRows,
    RowSource,
    Volume,
    bias_grad,
    empty,
    in_order,
    read,
    volume_bytes,
    write,
)

MIN_SLAB_VALUES = 20480
"""Smallest channels x rows x height for which torch uses its fast CPU kernel for an fp32 convolution of one volume.

Thinner slabs took 15 times as long and would save only 80 KB per voxel of width.
"""

Found = tuple[Tensor, ...]
"""Statistics of a block's norms: mean and rstd of each."""

Target = Literal["host", "device"] | None
"""Where the gradient of a block's input is to lie, if it is needed; in place of the host, its reader may compute it."""


def slabs(x: Volume, rows: int, channels: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return start and end of each slab of about `rows` rows, for convolutions of at least `channels` channels.

    One or two rows that are left at the end belong to the slab before them: of so few, oneDNN's 16-bit gradients of
    weights read uninitialised memory on CPUs with AVX-512.
    """
    total, height = x.shape[2], x.shape[3]
    if dtype == torch.float32:
        fewest = MIN_SLAB_VALUES // (channels * height) + 1
        rows = max(rows, fewest + fewest % 2)
    starts = range(0, max(total - min(rows - 1, 2), 1), rows)
    return list(zip(starts, [*starts[1:], total], strict=True))


class Statistics:
    """Mean and 1 / sqrt(variance + eps) of each group, combined from the moments of slabs.

    Squared distances are taken from each slab's own mean, so a large mean costs no precision. All slabs but the last
    have equally many rows.
    """

    def __init__(self, x: Volume, slabs: list[tuple[int, int]], norm: nn.GroupNorm) -> None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        self._eps, self._slabs = norm.eps, slabs
        self._parts = torch.empty((2, len(slabs), x.shape[0], norm.num_groups), dtype=dtype, device=x.device)
        self._next = 0

    def add(self, slab: Tensor, place: Volume | None = None) -> None:
        """Add the moments of the next slab and write the slab to `place`, if given."""
        mean, rstd = self._parts[:, self._next]
        start, end = self._slabs[self._next]
        if isinstance(place, Tensor):
            store_statistics(place[:, :, start:end], mean, rstd, slab, 0.0)
        else:
            for target, values in zip((mean, rstd), statistics(slab, mean.shape[1], 0.0), strict=True):
                target.copy_(values)
            if isinstance(place, HostVolume):
                place.write(start, slab)
        self._next += 1

    def result(self) -> tuple[Tensor, Tensor]:
        """Return mean and rstd, both (batch, groups)."""
        assert self._next == len(self._slabs), "result needs the moments of every slab"
        counts = [end - start for start, end in self._slabs]
        each, rstds = self._parts
        # Filled in place, because copying a list to a GPU would wait for it.
        share = each.new_full((len(counts), 1, 1), counts[0] / sum(counts))
        share[-1] = counts[-1] / sum(counts)
        mean = (share * each).sum(0)
        variance = (share * (rstds.pow(-2) + (each - mean).square())).sum(0)
        return mean, (variance + self._eps).rsqrt()


def statistics_of(x: Volume, norm: nn.GroupNorm, rows: int) -> tuple[Tensor, Tensor]:
    """Return mean and rstd of each group, (batch, groups); rows that are computed on demand are read in slabs."""
    if isinstance(x, Tensor):
        return statistics(x, norm.num_groups, norm.eps)
    if isinstance(x, HostVolume) and (norm.num_groups, norm.eps) in x.statistics:
        return x.statistics[norm.num_groups, norm.eps]
    all_slabs = slabs(x, rows, x.shape[1], x.dtype)
    result, source = Statistics(x, all_slabs, norm), in_order(x, all_slabs[0][1])
    for start, end in all_slabs:
        result.add(read(source, start, end))
    return result.result()


def stored(x: RowSource, rows: int, host: HostSpace | None) -> Volume:
    """Compute all rows of a volume; put them into the memory of `host` if they are to lie there, else on the device."""
    volume = host.volume(x) if host is not None and volume_bytes(x) > host.above else empty(x)
    for start, end in slabs(x, rows, x.shape[1], x.dtype):
        write(volume, start, x.rows(start, end))
    return volume


class Run:
    """What the blocks of one pass share: where volumes lie, and the gradients of parameters.

    Volumes between blocks lie in the memory of `host`; without it there is one block, and they lie on the device.
    """

    def __init__(
        self, rows: int, dtype: torch.dtype, host: HostSpace | None = None, wanted: Sequence[Tensor] = ()
    ) -> None:
        self.rows, self.dtype, self.host = rows, dtype, host
        self.gradients: dict[int, Tensor | None] = {id(parameter): None for parameter in wanted}

    def wants(self, parameter: Tensor | None) -> bool:
        """Return whether a parameter needs a gradient."""
        return id(parameter) in self.gradients

    def add(self, parameter: Tensor | None, part: Tensor) -> None:
        """Add to the gradient of a parameter, in full precision, if it needs one."""
        if self.wants(parameter):
            total = self.gradients[id(parameter)]
            self.gradients[id(parameter)] = full_precision(part) if total is None else total.add_(part)

    def add_all(self, parameters: Iterable[Tensor | None], parts: Iterable[Tensor]) -> None:
        """Add to the gradients of several parameters."""
        for parameter, part in zip(parameters, parts, strict=True):
            self.add(parameter, part)

    def add_biases(self, grad: Volume, *biases: Tensor | None, in_slabs: bool = False) -> None:
        """Add what the gradient of convolutions' output gives to those of biases.

        On the device it is whole; in host memory it comes in slabs. Either call does nothing in the other case.
        """
        if isinstance(grad, Tensor) and in_slabs == (self.host is not None) and any(map(self.wants, biases)):
            part = bias_grad(grad)
            self.add_all(biases, [part, *(part.clone() for _ in biases[1:])])  # each is added to by itself

    def slabs(self, x: Volume, channels: int, multiple: int = 1) -> list[tuple[int, int]]:
        """Return the slabs of a volume; all but the last have a multiple of so many rows."""
        return slabs(x, -(-self.rows // multiple) * multiple, channels, self.dtype)

    def place(self, like: Volume, target: Target) -> Volume | None:
        """Return an uninitialised volume, if it has a target."""
        if target is None:
            return None
        return self.host.volume(like) if target == "host" and self.host is not None else empty(like)


class LeanBlock(nn.Module, ABC):
    """A block that runs whole, or in slabs of `slab_rows` rows if that is not 0.

    Without gradients, large volumes lie in the memory of `host`, if it is given.
    """

    slab_rows = 0
    host: HostSpace | None = None
    always_keeps_only_input = False

    @property
    def keeps_only_input(self) -> bool:
        """Whether the block keeps only its input for backward, so that a checkpoint around it would gain nothing."""
        return self.always_keeps_only_input or self.slab_rows > 0

    def consume(self, x: Volume) -> Volume:
        """Run the block in slabs without gradients; `x` may be overwritten, because the caller no longer needs it."""
        return self.rows_forward(x, Run(self.slab_rows, compute_dtype(x), self.host), is_last=False)[0]

    @abstractmethod
    def rows_forward(self, x: Volume, run: Run, is_last: bool) -> tuple[Volume, Found]:
        """Return the output, on the device if it is the last one, and the statistics that backward needs."""

    @abstractmethod
    def rows_backward(self, x: Volume, statistics: Found, grad: Volume, run: Run, target: Target) -> Volume | None:
        """Add the gradients of the parameters and return that of `x`.

        Without a `target`, nobody needs it.
        """


class _Chain:
    """Consecutive blocks that run in slabs of `rows` rows."""

    def __init__(self, blocks: Sequence[LeanBlock], rows: int, dtype: torch.dtype, host: HostSpace | None) -> None:
        self.blocks, self.rows, self.dtype, self.host = blocks, rows, dtype, host
        self.parameters = [parameter for block in blocks for parameter in block.parameters()]

    def forward(self, x: Volume, keeps: bool) -> tuple[Tensor, list[HostVolume | None], list[Found]]:
        """Run all blocks; return the output, if wanted the inputs that lie in host memory, and all statistics."""
        run, out = Run(self.rows, self.dtype, self.host), x
        inputs, statistics = [], []
        with torch.autocast(x.device.type, enabled=False):
            for block in self.blocks:
                inputs.append(out if keeps and isinstance(out, HostVolume) else None)
                out, found = block.rows_forward(out, run, is_last=block is self.blocks[-1])
                statistics.append(found)
        if self.host is not None:
            self.host.copies.finish()
        assert isinstance(out, Tensor), "the last block leaves its output on the device"
        return out, inputs, statistics

    def backward(
        self, x: Tensor, inputs: list[HostVolume | None], statistics: list[Found], grad: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and of all parameters that need one."""
        wanted = [parameter for parameter, is_needed in zip(self.parameters, needs[1:], strict=True) if is_needed]
        run = Run(self.rows, self.dtype, self.host, wanted)
        back: Volume | None = grad
        while inputs:
            assert back is not None, "only the first block has no gradient to hand on"
            number = len(inputs) - 1
            target: Target = "host" if number else "device" if needs[0] else None
            source = self._input(x, inputs, run)
            inputs.pop()
            back = self.blocks[number].rows_backward(source, statistics[number], back, run, target)
        if self.host is not None:
            self.host.copies.finish()
        assert back is None or isinstance(back, Tensor), "the gradient of the input is on the device"
        return back, *(run.gradients.get(id(parameter)) for parameter in self.parameters)

    def _input(self, x: Tensor, inputs: list[HostVolume | None], run: Run) -> Volume:
        """Return the input of the last of the blocks that `inputs` has, computed from the one before it if need be."""
        *before, kept = inputs
        if not before:
            return x
        if kept is not None:
            return kept
        return self.blocks[len(before) - 1].rows_forward(self._input(x, before, run), run, is_last=False)[0]


class _InSlabs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: _Chain, keeps: bool, *parameters: Tensor) -> Tensor:
        out, inputs, statistics = chain.forward(x, keeps)
        ctx.chain, ctx.inputs = chain, inputs if keeps else None
        ctx.counts = [len(found) for found in statistics]
        ctx.save_for_backward(x, *parameters, *(part for found in statistics for part in found))
        return out

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        left = iter(others[len(needs) - 1 :])
        statistics = [tuple(islice(left, count)) for count in ctx.counts]
        with torch.autocast(x.device.type, enabled=False):
            inputs, ctx.inputs = ctx.inputs, None
            if inputs is None:
                inputs = ctx.chain.forward(x, keeps=True)[1]
            of_x, *of_parameters = ctx.chain.backward(x, inputs, statistics, grad, needs)
        return of_x, None, None, *of_parameters


def in_slabs(
    x: Volume, blocks: Sequence[LeanBlock], rows: int, host: HostSpace | None = None, recomputes: bool = False
) -> Tensor:
    """Run consecutive blocks in slabs of `rows` rows, one on the device or several through the memory of `host`.

    With `recomputes`, volumes in host memory are not kept for backward, which computes them again first.
    """
    chain = _Chain(blocks, rows, compute_dtype(x), host)
    if not torch.is_grad_enabled():
        return chain.forward(x, keeps=False)[0]
    assert isinstance(x, Tensor), "with gradients, the input is on the device"
    return _InSlabs.apply(x, chain, not recomputes, *chain.parameters)


class NormGradRows(RowSource):
    """The gradient of a norm's input, computed on demand from what its backward has kept; `plus` is added to it."""

    def __init__(self, kept: Volume, normed: NormedRows, length: int, plus: Volume | None = None) -> None:
        super().__init__(kept)
        self._place, self._kept, self._normed, self._plus = kept, in_order(kept, length), normed, plus

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        out = read(self._kept, start, end)
        plus = None if self._plus is None else read(self._plus, start, end)
        self._normed.input_grad(out, start, end, plus, is_absorbed=isinstance(self._place, HostVolume))
        return out

    def stored(self, run: Run) -> Volume:
        """Compute all rows and put them where what was kept lies, or beside it."""
        place = self._place if isinstance(self._place, HostVolume) else run.place(self, "host")
        assert place is not None, "the host is a place"
        for start, end in run.slabs(self, self.shape[1]):
            write(place, start, self.rows(start, end))
        return place
