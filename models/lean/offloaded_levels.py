"""Training past the memory of the device: consecutive levels whose volumes and gradients lie in host memory.

The levels are one autograd function of a volume that fits the device to another one that does. In between, forward and
backward of each block read rows from the host and write rows to it; the device holds a few slabs. What a block computes
from its input is computed again wherever that takes less time than copying it to the host and back. Group statistics
and the sums that the gradient of a norm needs cover all rows, so gradients are exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from models.lean import native
from models.lean.host_volumes import HostSpace, HostVolume, Remembered, in_order, with_halos
from models.lean.interpolation import Enlarged, interpolated_rows
from models.lean.norm import compute_dtype, full_precision
from models.lean.norm.affine import Norm
from models.lean.resampling import DownsampledRows, Strides, UpsampledRows, folded, unfolded
from models.lean.slab_blocks import norm_conv_rows
from models.lean.slabs import (
    ConvolvedRows,
    NormedRows,
    RowSource,
    Volume,
    bias_grad,
    convolve_backward,
    empty,
    layout_of_volume,
    read,
    rows_of,
    slabs,
)
from models.lean.streaming import Layers, Residual, residual_on_host, stored

Norms = tuple[Norm, ...]
Target = Literal["host", "device"]
"""Where the gradient of a stage's input is to lie; it may also be left to its reader, in place of the host."""


class Pass:
    """What the stages of one forward or backward pass share: where volumes lie, and the gradients of parameters."""

    def __init__(self, rows: int, host: HostSpace, dtype: torch.dtype, wanted: Sequence[Tensor] = ()) -> None:
        self.rows, self.host, self.dtype = rows, host, dtype
        self.gradients: dict[int, Tensor | None] = {id(parameter): None for parameter in wanted}

    def wants(self, parameter: Tensor | None) -> bool:
        """Return whether a parameter needs a gradient."""
        return id(parameter) in self.gradients

    def add(self, parameter: Tensor | None, part: Tensor) -> None:
        """Add to the gradient of a parameter, in full precision, if it needs one."""
        if self.wants(parameter):
            total = self.gradients[id(parameter)]
            self.gradients[id(parameter)] = full_precision(part) if total is None else total.add_(part)

    def slabs(self, x: Volume, channels: int, multiple: int = 1) -> list[tuple[int, int]]:
        """Return the slabs of a volume; all but the last have a multiple of so many rows."""
        return slabs(x, -(-self.rows // multiple) * multiple, channels, self.dtype)

    def place(self, like: Volume, target: Target | None) -> Volume | None:
        """Return an uninitialised volume, if it has a target."""
        if target is None:
            return None
        return empty(like) if target == "device" else self.host.volume(like)

    def add_bias(self, bias: Tensor, grad: Tensor) -> None:
        """Add to the gradient of a convolution's bias what rows of its output's gradient give."""
        if self.wants(bias):
            self.add(bias, bias_grad(grad))


def write(volume: Volume, start: int, rows: Tensor) -> None:
    """Write rows of a volume, on the device or on the host, the first of them to row `start`."""
    if isinstance(volume, Tensor):
        volume[:, :, start : start + rows.shape[2]] = rows
    else:
        assert isinstance(volume, HostVolume), "rows that are computed on demand have no place"
        volume.write(start, rows.to(volume.dtype))


class Rows(RowSource):
    """Rows that a function of their start and end computes."""

    def __init__(self, like: Volume, dtype: torch.dtype, compute: Callable[[int, int], Tensor]) -> None:
        self.shape, self.dtype, self.device, self.layout = like.shape, dtype, like.device, layout_of_volume(like)
        self._compute = compute

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        return self._compute(start, end)


class Stage(ABC):
    """A block that reads its input in slabs; `parameters` are those that it may have gradients of."""

    parameters: tuple[Tensor, ...]

    @abstractmethod
    def forward(self, x: Volume, run: Pass, is_last: bool) -> tuple[Volume, Norms]:
        """Return the output, on the device if it is the last one, and the norms that backward needs."""

    @abstractmethod
    def backward(self, x: Volume, norms: Norms, grad: Volume, run: Pass, target: Target | None) -> Volume | None:
        """Add the gradients of the parameters and return that of `x`.

        Without a `target`, nobody needs it.
        """


class FirstConvolution(Stage):
    """The first convolution of an encoder; its output is computed whenever it is read."""

    def __init__(self, conv: nn.Conv3d) -> None:
        self.parameters = tuple(conv.parameters())

    @override
    def forward(self, x: Volume, run: Pass, is_last: bool) -> tuple[Volume, Norms]:
        return ConvolvedRows(x, *(part.to(run.dtype) for part in self.parameters)), ()

    @override
    def backward(self, x: Volume, norms: Norms, grad: Volume, run: Pass, target: Target | None) -> Volume | None:
        weight, bias = self.parameters
        place = run.place(x, target)
        all_slabs = run.slabs(x, min(weight.shape[:2]))
        source, low_weight = with_halos(grad, all_slabs[0][1]), weight.to(run.dtype)
        for start, end in all_slabs:
            part = rows_of(source, start - 1, end + 1)
            needs = (place is not None, run.wants(weight))
            of_x, of_weight = convolve_backward(part, rows_of(x, start, end).to(run.dtype), low_weight, needs)
            run.add(weight, of_weight)
            run.add_bias(bias, part[:, :, 1:-1])
            if place is not None:
                write(place, start, of_x)
        return place


class ResidualStage(Stage):
    """A residual block, whose output is in host memory.

    Names as in `slab_blocks`: h = conv1(silu(norm1(x))), and the output is conv2(silu(norm2(h))) + shortcut(x).
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        norms, convs, shortcut = layers
        parts: list[Tensor] = []
        for norm, conv in zip(norms, convs, strict=True):
            parts += [*norm.parameters(), *conv.parameters()]
        self.parameters = (*parts, *(() if shortcut is None else shortcut.parameters()))

    @override
    def forward(self, x: Volume, run: Pass, is_last: bool) -> tuple[Volume, Norms]:
        assert not is_last, "a resampling block or a head follows"
        return residual_on_host(x, Residual.of(self.layers, run.dtype), run.rows, run.host, keeps_input=True)

    @override
    def backward(self, x: Volume, norms: Norms, grad: Volume, run: Pass, target: Target | None) -> Volume | None:
        """Go over the slabs twice, because each norm needs sums over all voxels; the gradient of x takes a third time.

        That one is left to its reader, which is why h is computed three times in all.
        """
        if isinstance(grad, NormGradRows):
            grad = grad.stored(run)
        block = Residual.of(self.layers, run.dtype)
        scale1, shift1, weight1, bias1, scale2, shift2, weight2, bias2, *shortcut = self.parameters
        all_slabs = run.slabs(x, min(weight1.shape[:2]))
        length = all_slabs[0][1]
        x_rows = with_halos(x, length)
        first = NormedRows(x_rows, norms[0], run.dtype)
        convolved = ConvolvedRows(first, block.weight1, block.bias1)
        second = NormedRows(Remembered(convolved), norms[1], run.dtype)
        kept: HostVolume = run.host.volume(convolved)
        grad_rows = with_halos(grad, length)
        for start, end in all_slabs:
            h = second.rows(start, end)
            part = rows_of(grad_rows, start - 1, end + 1).to(run.dtype)
            of_h, of_weight = convolve_backward(part, h, block.weight2, (True, run.wants(weight2)))
            del h
            run.add(weight2, of_weight)
            part = part[:, :, 1:-1]
            run.add_bias(bias2, part)
            if block.shortcut is not None:
                run.add_bias(shortcut[1], part)
                if run.wants(shortcut[0]):
                    inputs = read(x_rows, start, end).to(run.dtype)
                    _, of_shortcut = native.convolution_backward(part, inputs, block.shortcut, (False, True))
                    run.add(shortcut[0], of_shortcut)
                    del inputs
            del part
            second.absorb(of_h, start, end, store=of_h)
            kept.write(start, of_h)
            del of_h
        for parameter, total in zip((scale2, shift2), second.finish(), strict=True):
            run.add(parameter, total)
        second.x = Remembered(convolved)
        of_h_rows = Remembered(NormGradRows(kept, second, length))
        back = Rows(x, run.dtype, lambda start, end: _input_grad(of_h_rows, block.weight1, start, end))
        # Where it fits, what the first norm keeps takes the place of what the second one kept.
        fits = kept.shape == x.shape
        for start, end in all_slabs:
            part = rows_of(of_h_rows, start - 1, end + 1)
            of_rows, of_weight = convolve_backward(
                part, first.rows(start, end), block.weight1, (True, run.wants(weight1))
            )
            run.add(weight1, of_weight)
            run.add_bias(bias1, part[:, :, 1:-1])
            first.absorb(of_rows, start, end, store=of_rows)
            if fits:
                kept.write(start, of_rows)
            del part, of_rows
        for parameter, total in zip((scale1, shift1), first.finish(), strict=True):
            run.add(parameter, total)
        plus = in_order(grad, length)
        if block.shortcut is not None:
            plus = _through_shortcut(plus, x, block.shortcut)
        return NormGradRows(kept if fits else back, first, length, plus)


def _input_grad(grad: Volume, weight: Tensor, start: int, end: int) -> Tensor:
    """Return some rows of the gradient of a convolution's input, from the rows of that of its output."""
    part = rows_of(grad, start - 1, end + 1).to(weight.dtype)
    # Only its shape and layout matter.
    x = empty(grad, weight.shape[1], weight.dtype, end - start)
    return convolve_backward(part, x, weight, (True, False))[0]


def _through_shortcut(grad: Volume, x: Volume, weight: Tensor) -> RowSource:
    """Return what the gradient of a shortcut's output gives to its input, a product with the weight, transposed."""
    back = weight.transpose(0, 1).contiguous(memory_format=layout_of_volume(x))
    return Rows(x, weight.dtype, lambda start, end: F.conv3d(rows_of(grad, start, end).to(back.dtype), back))


class NormGradRows(RowSource):
    """The gradient of a norm's input, computed on demand from what its backward has kept; `plus` is added to it."""

    def __init__(self, kept: Volume, normed: NormedRows, length: int, plus: Volume | None = None) -> None:
        self.shape, self.dtype, self.device, self.layout = kept.shape, kept.dtype, kept.device, layout_of_volume(kept)
        self._place, self._kept, self._normed, self._plus = kept, in_order(kept, length), normed, plus

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        out = read(self._kept, start, end)
        plus = None if self._plus is None else read(self._plus, start, end)
        self._normed.input_grad(out, start, end, plus, is_absorbed=isinstance(self._place, HostVolume))
        return out

    def stored(self, run: Pass) -> HostVolume:
        """Compute all rows and put them where what was kept lies, or beside it."""
        place = self._place if isinstance(self._place, HostVolume) else run.host.volume(self)
        for start, end in run.slabs(self, self.shape[1]):
            place.write(start, self.rows(start, end))
        return place


class UpsampleStage(Stage):
    """Nearest-neighbour upsampling and a convolution; its output is computed whenever it is read."""

    def __init__(self, conv: nn.Conv3d, strides: Strides) -> None:
        self.parameters, self.strides = tuple(conv.parameters()), tuple(strides)

    @override
    def forward(self, x: Volume, run: Pass, is_last: bool) -> tuple[Volume, Norms]:
        weight, bias = self.parameters
        return UpsampledRows(x, weight, bias, self.strides, run.dtype), ()

    @override
    def backward(self, x: Volume, norms: Norms, grad: Volume, run: Pass, target: Target | None) -> Volume | None:
        weight, bias = self.parameters
        stride, place = self.strides[0], run.place(x, target)
        kernel, of_kernel = folded(weight, self.strides).to(run.dtype), None
        all_slabs = slabs(x, max(1, run.rows // stride), min(weight.shape[:2]), run.dtype)
        length = all_slabs[0][1]
        source, small = with_halos(grad, stride * length), in_order(x, length)
        for start, end in all_slabs:
            part = rows_of(source, stride * start - 1, stride * end + 1).to(run.dtype)
            inputs = rows_of(small, start, end).to(run.dtype)
            needs = (place is not None, run.wants(weight))
            of_x, of_part = native.transposed_convolution_backward(
                part, inputs, kernel, needs, self.strides, padding=(0, 1, 1)
            )
            if run.wants(weight):
                of_kernel = full_precision(of_part) if of_kernel is None else of_kernel.add_(of_part)
            run.add_bias(bias, part[:, :, 1:-1])
            if place is not None:
                write(place, start, of_x)
        if of_kernel is not None:
            run.add(weight, unfolded(of_kernel, self.strides))
        return place


class InterpolationStage(UpsampleStage):
    """Trilinear upsampling and a convolution; its output is computed whenever it is read."""

    @override
    def forward(self, x: Volume, run: Pass, is_last: bool) -> tuple[Volume, Norms]:
        weight, bias = self.parameters
        return interpolated_rows(x, weight, bias, self.strides, run.dtype), ()

    @override
    def backward(self, x: Volume, norms: Norms, grad: Volume, run: Pass, target: Target | None) -> Volume | None:
        weight, bias = self.parameters
        stride, place = self.strides[0], run.place(x, target)
        all_slabs = run.slabs(grad, min(weight.shape[:2]))
        length, low_weight = all_slabs[0][1], weight.to(run.dtype)
        source = with_halos(grad, length)
        enlarged = Enlarged(with_halos(x, -(-length // stride)), self.strides, run.dtype)
        unfinished: tuple[int, Tensor] | None = None  # rows of the gradient that the next slab adds to
        for start, end in all_slabs:
            part = rows_of(source, start - 1, end + 1).to(run.dtype)
            needs = (place is not None, run.wants(weight))
            of_rows, of_weight = convolve_backward(part, enlarged.rows(start, end), low_weight, needs)
            run.add(weight, of_weight)
            run.add_bias(bias, part[:, :, 1:-1])
            if place is not None:
                first, total = enlarged.small_grad(of_rows, start)
                if unfinished is not None:
                    before, rows = unfinished
                    write(place, before, rows[:, :, : first - before])
                    rest = rows[:, :, first - before :]
                    total[:, :, : rest.shape[2]] += rest
                unfinished = (first, total)
        if place is not None and unfinished is not None:
            write(place, *unfinished)
        return place


class DownsampleStage(Stage):
    """A convolution with strides."""

    def __init__(self, conv: nn.Conv3d, strides: Strides) -> None:
        self.parameters, self.strides = tuple(conv.parameters()), tuple(strides)

    @override
    def forward(self, x: Volume, run: Pass, is_last: bool) -> tuple[Volume, Norms]:
        weight, bias = self.parameters
        stride = self.strides[0]
        small = max(1, run.rows // stride)
        rows = DownsampledRows(with_halos(x, stride * small), weight, bias, self.strides, run.dtype)
        return stored(rows, small, None if is_last else run.host), ()

    @override
    def backward(self, x: Volume, norms: Norms, grad: Volume, run: Pass, target: Target | None) -> Volume | None:
        """Add the gradients of the parameters; that of x, which is a few products, is left to its reader."""
        if isinstance(grad, NormGradRows):
            grad = grad.stored(run)
        weight, bias = self.parameters
        low_weight, stride = weight.to(run.dtype), self.strides[0]
        all_slabs = run.slabs(x, min(weight.shape[:2]), multiple=stride)
        length = all_slabs[0][1]
        small = with_halos(grad, -(-length // stride))
        large = in_order(x, length)
        if run.wants(weight) or run.wants(bias):
            for start, end in all_slabs:
                part, inputs = self._wide(small, x, start, end, run.dtype), rows_of(large, start, end).to(run.dtype)
                if run.wants(weight):
                    run.add(weight, self._back(part, inputs, low_weight, (False, True))[1])
                run.add_bias(bias, part[:, :, 1 : 1 - (-(end - start) // stride)])

        def compute(start: int, end: int) -> Tensor:
            before = start % stride
            part = self._wide(small, x, start - before, end, run.dtype)
            like = empty(x, x.shape[1], run.dtype, end - start + before)  # only its shape and layout matter
            return self._back(part, like, low_weight, (True, False))[0][:, :, before:]

        return Rows(x, run.dtype, compute)

    def _back(self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
        return native.convolution_backward(grad, x, weight, needs, self.strides, (2, *self.strides[1:]))

    def _wide(self, grad: Volume, x: Volume, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return the gradient's rows that depend on the rows of x from `start` to `end`, and zeros around the planes.

        With a padding of two rows, a convolution of those rows has exactly these outputs.
        """
        stride = self.strides[0]
        first, last = start // stride - 1, -(-end // stride) + (1 if stride == 1 else 0)
        axes = list(zip(x.shape[3:], self.strides[1:], strict=True))
        around = [amount for size, step in reversed(axes) for amount in (step - 1, size % step)]
        return F.pad(rows_of(grad, first, last).to(dtype), around)


class HeadStage(Stage):
    """The last norm and convolution of a decoder."""

    def __init__(self, norm: nn.GroupNorm, conv: nn.Conv3d) -> None:
        self.norm, self.parameters = norm, (*norm.parameters(), *conv.parameters())

    @override
    def forward(self, x: Volume, run: Pass, is_last: bool) -> tuple[Volume, Norms]:
        assert is_last, "nothing follows the head"
        scale, shift, *_ = self.parameters
        options = (self.norm.num_groups, self.norm.eps, run.rows, run.dtype)
        out, (mean, rstd) = norm_conv_rows(x, self.parameters, *options)
        return out, (Norm(mean, rstd, scale, shift, silu=False),)

    @override
    def backward(self, x: Volume, norms: Norms, grad: Volume, run: Pass, target: Target | None) -> Volume | None:
        """Add the gradients of the parameters; that of x, from few channels, is left to its reader."""
        scale, shift, weight, bias = self.parameters
        all_slabs = run.slabs(x, x.shape[1])
        length, low_weight = all_slabs[0][1], weight.to(run.dtype)
        normed = NormedRows(with_halos(x, length), norms[0], run.dtype)
        for start, end in all_slabs:
            part = rows_of(grad, start - 1, end + 1).to(run.dtype)
            of_rows, of_weight = convolve_backward(part, normed.rows(start, end), low_weight, (True, run.wants(weight)))
            run.add(weight, of_weight)
            run.add_bias(bias, part[:, :, 1:-1])
            normed.absorb(of_rows, start, end, store=of_rows)
        for parameter, total in zip((scale, shift), normed.finish(), strict=True):
            run.add(parameter, total)

        def compute(start: int, end: int) -> Tensor:
            out = _input_grad(grad, low_weight, start, end)
            of_norm.input_grad(out, start, end)
            return out

        of_norm = normed
        of_norm.x = with_halos(x, length)
        return Rows(x, run.dtype, compute)


class Tape:
    """What a forward pass has left for backward: the inputs of stages that lie in host memory, and the norms."""

    def __init__(self) -> None:
        self.inputs: list[HostVolume | None] = []
        self.norms: list[Norms] = []


class OffloadedLevels:
    """Consecutive stages that run in slabs of `rows` rows with their volumes in host memory.

    With `recomputes`, the volumes are not kept for backward, which computes them again first.
    """

    def __init__(self, stages: Sequence[Stage], rows: int, host: HostSpace, recomputes: bool = False) -> None:
        self.stages, self.rows, self.host, self.recomputes = stages, rows, host, recomputes
        self.parameters = [parameter for stage in stages for parameter in stage.parameters]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output of the last stage, on the device."""
        dtype = compute_dtype(x)
        if torch.is_grad_enabled():
            return _Function.apply(x, self, dtype, *self.parameters)
        return self.forward(x, dtype, None)

    def forward(self, x: Tensor, dtype: torch.dtype, tape: Tape | None) -> Tensor:
        """Run all stages, and write down on `tape` what backward needs."""
        run, h = Pass(self.rows, self.host, dtype), x
        out: Volume = h
        with torch.autocast(x.device.type, enabled=False):
            for stage in self.stages:
                if tape is not None:
                    tape.inputs.append(out if isinstance(out, HostVolume) else None)
                out, norms = stage.forward(out, run, is_last=stage is self.stages[-1])
                if tape is not None:
                    tape.norms.append(norms)
        self.host.copies.finish()
        assert isinstance(out, Tensor), "the last stage leaves its output on the device"
        return out

    def backward(
        self, x: Tensor, tape: Tape, grad: Tensor, dtype: torch.dtype, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and of all parameters that need one."""
        needs_x, *needed = needs
        wanted = [parameter for parameter, is_needed in zip(self.parameters, needed, strict=True) if is_needed]
        run, flow = Pass(self.rows, self.host, dtype, wanted), grad
        back: Volume | None = flow
        for number in reversed(range(len(self.stages))):
            assert back is not None, "only the first stage has no gradient to hand on"
            target: Target | None = "host" if number else "device" if needs_x else None
            source = self._input(number, x, tape, run)
            back = self.stages[number].backward(source, tape.norms[number], back, run, target)
            tape.inputs[number] = None
        self.host.copies.finish()
        assert back is None or isinstance(back, Tensor), "the gradient of the input is on the device"
        return back, *(run.gradients.get(id(parameter)) for parameter in self.parameters)

    def _input(self, number: int, x: Tensor, tape: Tape, run: Pass) -> Volume:
        """Return the input of a stage, in host memory or computed on demand from that of the stage before it."""
        if number == 0:
            return x
        kept = tape.inputs[number]
        if kept is not None:
            return kept
        return self.stages[number - 1].forward(self._input(number - 1, x, tape, run), run, is_last=False)[0]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: OffloadedLevels, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        is_kept = any(ctx.needs_input_grad) and not levels.recomputes
        ctx.tape = Tape() if is_kept else None
        ctx.save_for_backward(x)
        ctx.levels, ctx.dtype = levels, dtype
        return levels.forward(x, dtype, ctx.tape)

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), tape = ctx.saved_tensors, ctx.tape
        with torch.autocast(x.device.type, enabled=False):
            if tape is None:
                tape = Tape()
                ctx.levels.forward(x, ctx.dtype, tape)
            ctx.tape = None
            needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
            of_x, *others = ctx.levels.backward(x, tape, grad, ctx.dtype, needs)
        return of_x, None, None, *others
