"""Upsampling and downsampling, each as one convolution: no enlarged or padded copy, and only the input is saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from monai.networks.blocks import Upsample
from monai.networks.nets.autoencoderkl import AEKLDownsample
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from models.lean import native
from models.lean.layout import arranged, layout_of
from models.lean.norm import compute_dtype, full_precision
from models.lean.rows import (
    ComputedRows,
    Relocatable,
    RowSource,
    Volume,
    bias_grad,
    convolve_backward,
    convolved_rows,
    empty,
    in_order,
    layout_of_volume,
    read,
    rows_of,
    with_halos,
    write,
)
from models.lean.slabs import Found, LeanBlock, NormGradRows, Run, Target, in_slabs, slabs, stored

Strides = Sequence[int]
"""The factors, 1 or 2, by which the three axes are shrunk or enlarged."""

INTERPOLATED_ROWS = 16
"""Rows of an interpolated volume that are computed at a time where the settings do not say."""


def folded(weight: Tensor, strides: Strides) -> Tensor:
    """Return the kernel of the transposed convolution that upsamples by `strides` and convolves with `weight`.

    Nearest-neighbour upsampling by two repeats each voxel, so along that axis two of the three taps read the same voxel
    and can be added: the last two for even output voxels, the first two for odd ones. A transposed convolution of
    stride two applies its odd taps to even output voxels and its even taps to odd ones, four taps in all. Along an axis
    that is not upsampled it applies the three taps in reverse order. In full precision, so that each tap is rounded
    once.
    """
    return _add_neighbours(full_precision(weight).flip(2, 3, 4), strides, padding=1).transpose(0, 1)


def unfolded(grad: Tensor, strides: Strides) -> Tensor:
    """Return the gradient of the 3x3x3 kernel from that of its folded form."""
    return _add_neighbours(grad.transpose(0, 1), strides, padding=0).flip(2, 3, 4)


def _add_neighbours(taps: Tensor, strides: Strides, padding: int) -> Tensor:
    """Add each tap to the next one, along the axes with stride two, with `padding` zeros at both ends.

    By slices: on a CPU, pooling takes twenty times as long, a seventh of a training step with 128 channels.
    """
    doubled = [axis for axis, stride in enumerate(strides, start=2) if stride == 2]
    if padding:
        taps = F.pad(taps, [padding * (axis in doubled) for axis in (4, 4, 3, 3, 2, 2)])
    for axis in doubled:
        count = taps.shape[axis] - 1
        taps = taps.narrow(axis, 0, count) + taps.narrow(axis, 1, count)
    return taps


def upsampled_rows(x: Volume, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype) -> ComputedRows:
    """Return the upsampled and convolved volume, computed row by row from the small one.

    At inference, the largest tensor of a decoder then never exists as a whole.
    """
    kernel, low_bias, (stride, *_) = folded(weight, strides).to(dtype), bias.to(dtype), strides

    def compute(start: int, end: int) -> Tensor:
        if isinstance(x, Tensor) and (start, end) == (0, stride * x.shape[2]):
            small, before, after = x, 1, 1
        else:
            first, last = (start - 1) // stride, end // stride + 1
            # What these small rows give begins and ends outside of the wanted rows, where the padding crops it.
            small, before, after = rows_of(x, first, last), start - stride * first + 1, stride * last + 1 - end
        padding = min(before, after)
        with torch.autocast(x.device.type, enabled=False):
            out = native.transposed_convolution(small.to(dtype), kernel, low_bias, strides, (padding, 1, 1))
        return out[:, :, before - padding : before - padding + end - start]

    grid = (size * stride for size, stride in zip(x.shape[2:], strides, strict=True))
    return ComputedRows(x, compute, dtype, (x.shape[0], weight.shape[0], *grid))


def downsampled_rows(x: Volume, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype) -> ComputedRows:
    """Return what `downsample_conv` returns, computed row by row."""
    low_weight, low_bias, (stride, *others) = weight.to(dtype), bias.to(dtype), strides
    grid = [size // stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    wanted = [slice(step - 1, step - 1 + size) for step, size in zip(others, grid[1:], strict=True)]
    # Along an axis with stride one there is a row of padding before the first, along others none.
    before, after = (1, 1) if stride == 1 else (0, 1)

    def compute(start: int, end: int) -> Tensor:
        haloed = rows_of(x, stride * start - before, stride * end + after)
        with torch.autocast(x.device.type, enabled=False):
            out = F.conv3d(haloed.to(dtype), low_weight, low_bias, tuple(strides), (0, *others))
        return out[:, :, :, *wanted].contiguous(memory_format=layout_of_volume(x))

    return ComputedRows(x, compute, dtype, (x.shape[0], weight.shape[0], *grid))


class _Resampled(torch.autograd.Function):
    """Up- or downsampling and a 3x3x3 convolution, of a whole volume.

    Upsampling is one transposed convolution: 8/27 of the work where each axis doubles. For downsampling the volume is
    padded by one voxel: at the end of an axis with stride two, at both ends of an axis with stride one. A convolution
    pads both ends alike, so an axis with stride two gets two voxels at each end, and its first output is dropped. That
    way the volume is never copied into a padded one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, strides: Strides, dtype: torch.dtype, enlarges: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.strides, ctx.dtype, ctx.enlarges = strides, dtype, enlarges
        with torch.autocast(x.device.type, enabled=False):
            if enlarges:
                source = upsampled_rows(x, weight, bias, strides, dtype)
                # On a CPU, convolutions of few channels return contiguous volumes whatever they are given.
                return arranged(source.rows(0, source.shape[2]), source.layout)
            # The padding is as wide as the stride.
            out = F.conv3d(x.to(dtype), weight.to(dtype), bias.to(dtype), tuple(strides), tuple(strides))
        wanted = [
            slice(stride - 1, stride - 1 + size // stride) for size, stride in zip(x.shape[2:], strides, strict=True)
        ]
        return out[:, :, *wanted].contiguous(memory_format=layout_of(out))

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), strides = ctx.saved_tensors, ctx.strides
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch.autocast(x.device.type, enabled=False):
            low, needs = grad.to(ctx.dtype), (needs_x, needs_weight)
            if ctx.enlarges:
                kernel = folded(weight, strides).to(ctx.dtype)
                of_x, of_weight = native.transposed_convolution_backward(low, x.to(ctx.dtype), kernel, needs, strides)
            else:
                # With stride two, an odd axis has one output after the wanted ones, an even axis none.
                axes = list(zip(x.shape[2:], strides, strict=True))
                low = F.pad(low, [amount for size, step in reversed(axes) for amount in (step - 1, size % step)])
                of_x, of_weight = native.convolution_backward(
                    low, x.to(ctx.dtype), weight.to(ctx.dtype), needs, strides, strides
                )
            if needs_weight:
                of_weight = full_precision(of_weight)
                of_weight = unfolded(of_weight, strides) if ctx.enlarges else of_weight
            of_bias = bias_grad(grad) if needs_bias else None
        return of_x.to(x.dtype) if needs_x else None, of_weight if needs_weight else None, of_bias, None, None, None


def upsample_conv(x: Tensor, conv: nn.Conv3d, strides: Strides = (2, 2, 2)) -> Tensor:
    """Enlarge each axis by its stride, by nearest-neighbour upsampling, and apply a 3x3x3 convolution."""
    return _Resampled.apply(x, conv.weight, conv.bias, strides, compute_dtype(x), True)


def downsample_conv(x: Tensor, conv: nn.Conv3d, strides: Strides = (2, 2, 2)) -> Tensor:
    """Shrink each axis by its stride with a 3x3x3 convolution; see `_Resampled` for the padding."""
    return _Resampled.apply(x, conv.weight, conv.bias, strides, compute_dtype(x), False)


def _doubled(x: Tensor, axis: int) -> Tensor:
    """Double one axis: each voxel becomes two, which take a quarter of the nearest neighbour on their side.

    Beyond the ends the outermost voxels are repeated.
    """
    size = x.shape[axis]
    shape = [*x.shape[:axis], 2 * size, *x.shape[axis + 1 :]]
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout_of(x))
    pairs = out.unflatten(axis, (size, 2))
    for side in (0, 1):
        half = pairs.select(axis + 1, side)
        half.copy_(x)
        inner, neighbour = (half.narrow(axis, 1 - side, size - 1), x.narrow(axis, side, size - 1))
        inner.lerp_(neighbour, 0.25)
    return out


def _doubled_backward(grad: Tensor, axis: int) -> Tensor:
    """Return the gradient of the input of `_doubled`."""
    size = grad.shape[axis] // 2
    first, second = grad.unflatten(axis, (size, 2)).unbind(axis + 1)
    out = torch.add(first, second)
    for side, part in ((0, first), (1, second)):
        # A quarter of each half's gradient belongs to the neighbour, except at the end that has none.
        moved = part.narrow(axis, 1 - side, size - 1)
        out.narrow(axis, 1 - side, size - 1).sub_(moved, alpha=0.25)
        out.narrow(axis, side, size - 1).add_(moved, alpha=0.25)
    return out


class Enlarged(RowSource):
    """The interpolated volume in `dtype`, computed row by row from the small one in full precision.

    torch's own trilinear upsampling adds gradients in no fixed order on a GPU; this one does not.
    """

    def __init__(self, x: Volume, strides: Strides, dtype: torch.dtype) -> None:
        grid = (size * stride for size, stride in zip(x.shape[2:], strides, strict=True))
        super().__init__(x, dtype, (*x.shape[:2], *grid))
        self.x, self.strides = x, tuple(strides)
        self._axes = [axis for axis, stride in zip((2, 3, 4), strides, strict=True) if stride == 2]

    def rows(self, start: int, end: int) -> Tensor:
        """Compute the rows from `start` to `end`."""
        first, last = self._needed(start, end)
        rows = full_precision(read(self.x, first, last))
        for axis in self._axes:
            rows = _doubled(rows, axis)
        start, end = start - self.strides[0] * first, end - self.strides[0] * first
        return rows[:, :, start:end].to(self.dtype, memory_format=self.layout)

    def small_grad(self, grad: Tensor, start: int) -> tuple[int, Tensor]:
        """Return what the gradient of the rows from `start` gives to the small volume's, and its first row there."""
        first, last = self._needed(start, start + grad.shape[2])
        before = start - self.strides[0] * first
        wide = rows_of(full_precision(grad), -before, self.strides[0] * (last - first) - before)
        for axis in reversed(self._axes):
            wide = _doubled_backward(wide, axis)
        return first, wide

    def _needed(self, start: int, end: int) -> tuple[int, int]:
        """Return the small rows that the rows from `start` to `end` depend on, with those that give them their ends.

        Interpolation repeats the outermost rows. Inside the volume that is wrong, but such rows are cut off.
        """
        stride = self.strides[0]
        return max(start // stride - stride + 1, 0), min(-(-end // stride) + stride - 1, self.x.shape[2])


def _merged(conv: nn.Conv3d, pointwise: nn.Conv3d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the convolution that equals one and then a pointwise one."""
    assert conv.bias is not None, "MONAI's convolutions have a bias"
    assert pointwise.bias is not None, "MONAI's convolutions have a bias"
    weight, matrix = full_precision(conv.weight), full_precision(pointwise.weight).flatten(1)
    bias = torch.addmv(full_precision(pointwise.bias), matrix, full_precision(conv.bias))
    return torch.tensordot(matrix, weight, 1), bias


class UpsampleBlock(LeanBlock):
    """Nearest-neighbour upsampling by `strides`, in MONAI's block two along each axis, then a convolution."""

    always_keeps_only_input = True

    def __init__(self, stock: Upsample, strides: Strides = (2, 2, 2)) -> None:
        super().__init__()
        self.postconv, self.strides = stock.postconv, tuple(strides)

    def forward(self, x: Tensor) -> Tensor:
        """Return the enlarged volume."""
        return upsample_conv(x, self.postconv.conv, self.strides)

    @override
    def consume(self, x: Volume) -> Volume:
        return super().consume(Relocatable(x) if isinstance(x, Tensor) else x)

    @override
    def rows_forward(self, x: Volume, run: Run, is_last: bool) -> tuple[Volume, Found]:
        """Return the enlarged volume as rows computed on demand, which the next block reads in slabs."""
        conv = self.postconv.conv
        rows = self._enlarged(x, conv.weight, conv.bias, run.dtype)
        rows.source = x if isinstance(x, Relocatable) else None
        rows.then = lambda after: self._enlarged(x, *_merged(conv, after), run.dtype)
        return rows, ()

    def _enlarged(self, x: Volume, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> ComputedRows:
        return upsampled_rows(x, weight, bias, self.strides, dtype)

    @override
    def rows_backward(self, x: Volume, statistics: Found, grad: Volume, run: Run, target: Target) -> Volume | None:
        weight, bias = self.postconv.conv.parameters()
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
            run.add_biases(part[:, :, 1:-1], bias, in_slabs=True)
            if place is not None:
                write(place, start, of_x)
        if of_kernel is not None:
            run.add(weight, unfolded(of_kernel, self.strides))
        return place


class InterpolationBlock(UpsampleBlock):
    """Trilinear upsampling by `strides`, as in MAISI's decoder, then a convolution.

    The enlarged volume never exists as a whole.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the enlarged volume."""
        return in_slabs(x, [self], self.slab_rows or INTERPOLATED_ROWS)

    @override
    def rows_forward(self, x: Volume, run: Run, is_last: bool) -> tuple[Volume, Found]:
        """Return the enlarged volume, on the device or as rows computed on demand, which the next block reads."""
        rows, _ = super().rows_forward(x, run, is_last)
        assert isinstance(rows, ComputedRows), "an enlarged volume is computed on demand"
        return stored(rows, run.rows, None) if is_last else rows, ()

    @override
    def _enlarged(self, x: Volume, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> ComputedRows:
        return convolved_rows(Enlarged(x, self.strides, dtype), weight.to(dtype), bias.to(dtype))

    @override
    def rows_backward(self, x: Volume, statistics: Found, grad: Volume, run: Run, target: Target) -> Volume | None:
        weight, bias = self.postconv.conv.parameters()
        stride, place = self.strides[0], run.place(x, target)
        all_slabs = run.slabs(grad, min(weight.shape[:2]))
        length, low_weight = all_slabs[0][1], weight.to(run.dtype)
        source = with_halos(grad, length)
        enlarged = Enlarged(with_halos(x, -(-length // stride)), self.strides, run.dtype)
        run.add_biases(grad, bias)
        unfinished: tuple[int, Tensor] | None = None  # rows of the gradient that the next slab adds to
        for start, end in all_slabs:
            part = rows_of(source, start - 1, end + 1).to(run.dtype)
            needs = (place is not None, run.wants(weight))
            of_rows, of_weight = convolve_backward(part, enlarged.rows(start, end), low_weight, needs)
            run.add(weight, of_weight)
            run.add_biases(part[:, :, 1:-1], bias, in_slabs=True)
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


class DownsampleBlock(LeanBlock):
    """A convolution with `strides`, in MONAI's block two along each axis.

    The input is padded by one voxel: at the end of an axis with stride two, at both ends of an axis with stride one.
    """

    always_keeps_only_input = True

    def __init__(self, stock: AEKLDownsample, strides: Strides = (2, 2, 2)) -> None:
        super().__init__()
        self.conv, self.strides = stock.conv, tuple(strides)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shrunk volume."""
        return downsample_conv(x, self.conv.conv, self.strides)

    @override
    def consume(self, x: Volume) -> Volume:
        return self(x) if isinstance(x, Tensor) else super().consume(x)

    @override
    def rows_forward(self, x: Volume, run: Run, is_last: bool) -> tuple[Volume, Found]:
        stride = self.strides[0]
        small = max(1, run.rows // stride)
        weight, bias = self.conv.conv.parameters()
        rows = downsampled_rows(with_halos(x, stride * small), weight, bias, self.strides, run.dtype)
        return stored(rows, small, None if is_last else run.host), ()

    @override
    def rows_backward(self, x: Volume, statistics: Found, grad: Volume, run: Run, target: Target) -> Volume | None:
        """Add the gradients of the parameters; that of x, which is a few products, is left to its reader."""
        if isinstance(grad, NormGradRows):
            grad = grad.stored(run)
        weight, bias = self.conv.conv.parameters()
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
                run.add_biases(part[:, :, 1 : 1 - (-(end - start) // stride)], bias, in_slabs=True)

        def compute(start: int, end: int) -> Tensor:
            before = start % stride
            part = self._wide(small, x, start - before, end, run.dtype)
            like = empty(x, x.shape[1], run.dtype, end - start + before)  # only its shape and layout matter
            return self._back(part, like, low_weight, (True, False))[0][:, :, before:]

        return ComputedRows(x, compute, run.dtype)

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
