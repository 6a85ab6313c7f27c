"""MONAI's autoencoder blocks with the same parameters and the same function in less memory.

Each lean block holds the layers of one stock block under the same names, so the state-dict keys stay MONAI's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from monai.networks.blocks import Convolution, SpatialAttentionBlock, Upsample
from monai.networks.nets.autoencoderkl import AEKLDownsample, AEKLResBlock
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from models.lean import native
from models.lean.attention import AttentionBlock
from models.lean.layout import CHANNELS_LAST, layout_of
from models.lean.norm import compute_dtype, group_norm
from models.lean.norm.torch_kernels import Norm
from models.lean.resampling import DownsampleBlock, InterpolationBlock, Strides, UpsampleBlock
from models.lean.rows import (
    ComputedRows,
    DeviceSpace,
    HostVolume,
    NormedRows,
    Remembered,
    RowSource,
    Volume,
    convolve,
    convolve_backward,
    convolved_rows,
    empty,
    in_order,
    layout_of_volume,
    partly_stored,
    read,
    rows_of,
    volume_bytes,
    with_halos,
    write,
)
from models.lean.slabs import Found, LeanBlock, NormGradRows, Run, Statistics, Target, in_slabs, statistics_of, stored
from runtime.observer import runs_on_cpu


def pointwise_conv(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """Apply a 1x1x1 convolution and keep the layout of `x`.

    On one thread, torch's own convolution on a CPU copies a channels-last fp32 volume into the other layout and stays
    there, forward and backward; there the matrix product of all voxels with the weight takes its place.
    """
    if runs_on_cpu(x) and compute_dtype(x) == torch.float32 and layout_of(x) == CHANNELS_LAST:
        return F.linear(x.movedim(1, -1), conv.weight.flatten(1), conv.bias).movedim(-1, 1)
    return conv(x)


class ResidualBlock(LeanBlock):
    """Norm, SiLU and convolution, twice, added to the input.

    In slabs, h = conv1(silu(norm1(x))), and the output is conv2(silu(norm2(h))) + shortcut(x).
    """

    def __init__(self, stock: AEKLResBlock) -> None:
        super().__init__()
        self.norm1, self.conv1 = stock.norm1, stock.conv1
        self.norm2, self.conv2 = stock.norm2, stock.conv2
        self.nin_shortcut = stock.nin_shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        if self.slab_rows:
            return in_slabs(x, [self], self.slab_rows)
        h = self.conv1.conv(group_norm(x, self.norm1, silu=True))
        h = group_norm(h, self.norm2, silu=True)
        # Ahead of the last convolution, which a checkpoint then skips: it stops once it has what backward needs.
        if self.shortcut is not None:
            x = pointwise_conv(x, self.shortcut)
        return x + self.conv2.conv(h)

    @property
    def shortcut(self) -> nn.Conv3d | None:
        """The 1x1x1 convolution around the others, where the number of channels changes."""
        return getattr(self.nin_shortcut, "conv", None)

    @override
    def consume(self, x: Volume) -> Volume:
        dtype, channels = compute_dtype(x), self.conv2.conv.out_channels
        size = x.shape.numel() // x.shape[1] * channels * dtype.itemsize
        host = None if self.host is None or size <= self.host.above else self.host
        return self._rows_forward(x, Run(self.slab_rows, dtype, host), consumes=True)[0]

    @override
    def rows_forward(self, x: Volume, run: Run, is_last: bool) -> tuple[Volume, Found]:
        assert is_last == (run.host is None), "in host memory, a resampling block or a head follows"
        return self._rows_forward(x, run, consumes=False)

    def _rows_forward(self, x: Volume, run: Run, consumes: bool) -> tuple[Volume, Found]:
        """Return the output and the statistics of both norms.

        A norm needs statistics of all rows before the first one can be normalised, so the rows are visited twice: once
        to compute h, once to produce the output in its place. With `consumes` the output overwrites x if it fits there
        and memory is short; h is then computed twice and never exists whole. A volume that x is computed from moves
        into the memory of the output instead, and the rows of h that have no room beside it are computed twice. If
        there is room, an input that is computed on demand and has a shortcut is kept, so that it is not computed twice.
        For backward nothing is kept but the output, because to compute h again takes less time than to copy it to the
        host and back.
        """
        host, dtype, shortcut = run.host, run.dtype, self.shortcut
        (weight1, bias1), (weight2, bias2) = _low(self.conv1.conv, dtype), _low(self.conv2.conv, dtype)
        all_slabs = run.slabs(x, min(weight1.shape[:2]))
        length = all_slabs[0][1]
        size = x.shape.numel() // x.shape[1] * weight1.shape[0] * dtype.itemsize
        with torch.autocast(x.device.type, enabled=False):
            spare = host.free if host is not None and consumes else 0
            if isinstance(x, ComputedRows) and shortcut is not None and spare >= volume_bytes(x) + size:
                x = stored(x, run.rows, host)
            in_memory = not isinstance(x, ComputedRows)
            overwrites = consumes and in_memory and spare < size and shortcut is None and x.dtype == dtype
            num_kept = 0 if overwrites or (host is not None and not consumes) else x.shape[2]  # rows of h
            norm1 = _norm(self.norm1, statistics_of(x, self.norm1, run.rows))
            source = with_halos(x, length) if in_memory or not consumes else x
            convolved = convolved_rows(NormedRows(source, norm1, dtype), weight1, bias1)
            place = x if overwrites else run.place(convolved, "host")
            assert place is not None, "every output has a place"
            is_short = isinstance(host, DeviceSpace) and consumes and spare < size
            if is_short and isinstance(x, ComputedRows) and x.source is not None and isinstance(place, Tensor):
                num_kept = x.source.move_to_end(place) or num_kept
            around = self._around(source, dtype)
            inner = Statistics(convolved, all_slabs, self.norm2)
            for start, end in all_slabs:
                inner.add(convolved.rows(start, end), place if end <= num_kept else None)
            norm2 = _norm(self.norm2, inner.result())
            num_kept = max((end for _, end in all_slabs if end <= num_kept), default=0)
            h = in_order(place, length) if num_kept == x.shape[2] else partly_stored(place, num_kept, convolved)
            second = NormedRows(h, norm2, dtype)
            outer = Statistics(convolved, all_slabs, self.norm1)
            for start, end in all_slabs:
                part = convolve(second.haloed(start, end), weight2, bias2)
                if isinstance(place, Tensor):
                    torch.add(part, around.rows(start, end), out=place[:, :, start:end])
                else:
                    part += around.rows(start, end)
                    outer.add(part, place)
                del part
            if isinstance(place, HostVolume):
                place.statistics = {(self.norm1.num_groups, self.norm1.eps): outer.result()}
        return place, (norm1.mean, norm1.rstd, norm2.mean, norm2.rstd)

    @override
    def rows_backward(self, x: Volume, statistics: Found, grad: Volume, run: Run, target: Target) -> Volume | None:
        """Go over the slabs twice, because each norm needs sums over all voxels; the gradient of x takes a third time.

        In host memory, that one is left to its reader, and h is computed three times in all.
        """
        if isinstance(grad, NormGradRows):
            grad = grad.stored(run)
        (weight1, bias1), (weight2, bias2) = self.conv1.conv.parameters(), self.conv2.conv.parameters()
        (low_weight1, low_bias1), low_weight2 = _low(self.conv1.conv, run.dtype), weight2.to(run.dtype)
        shortcut, shortcut_bias = (None, None) if self.shortcut is None else self.shortcut.parameters()
        low_shortcut = None if shortcut is None else shortcut.to(run.dtype)
        all_slabs = run.slabs(x, min(weight1.shape[:2]))
        length = all_slabs[0][1]
        x_rows, grad_rows = with_halos(x, length), with_halos(grad, length)
        first = NormedRows(x_rows, _norm(self.norm1, statistics[:2]), run.dtype)
        convolved = convolved_rows(first, low_weight1, low_bias1)
        h: Volume
        kept_h: Volume
        kept_x: Volume | None
        if run.host is None:
            assert isinstance(x, Tensor), "on the device, the input is a tensor"
            kept_x, h, kept_h = _places(x, weight1.shape[0], run.dtype)
        else:
            h, kept_h = Remembered(convolved), run.host.volume(convolved)
            # Where it fits, what the first norm keeps takes the place of what the second one kept.
            kept_x = kept_h if kept_h.shape == x.shape else None
        second = NormedRows(h, _norm(self.norm2, statistics[2:]), run.dtype)
        run.add_biases(grad, bias2, shortcut_bias)
        for start, end in all_slabs:
            if isinstance(h, Tensor):
                h[:, :, start:end] = convolved.rows(start, end)
            normed = second.rows(start, end)
            part = rows_of(grad_rows, start - 1, end + 1).to(run.dtype)
            of_h, of_weight = convolve_backward(part, normed, low_weight2, (True, run.wants(weight2)))
            del normed
            run.add(weight2, of_weight)
            part = part[:, :, 1:-1]
            run.add_biases(part, bias2, shortcut_bias, in_slabs=True)
            if low_shortcut is not None and run.wants(shortcut):
                inputs = rows_of(x_rows, start, end).to(run.dtype)
                run.add(shortcut, native.convolution_backward(part, inputs, low_shortcut, (False, True))[1])
                del inputs
            del part
            second.absorb(of_h, start, end, kept_h)
            del of_h, of_weight
        run.add_all(self.norm2.parameters(), second.finish())
        of_h_rows: Volume = kept_h
        if isinstance(kept_h, Tensor):
            second.input_grad(kept_h, 0, x.shape[2])
            run.add_biases(kept_h, bias1)
        else:
            second.x = Remembered(convolved)
            of_h_rows = Remembered(NormGradRows(kept_h, second, length))
        for start, end in all_slabs:
            part = rows_of(of_h_rows, start - 1, end + 1)
            of_rows, of_weight = convolve_backward(
                part, first.rows(start, end), low_weight1, (True, run.wants(weight1))
            )
            run.add(weight1, of_weight)
            run.add_biases(part[:, :, 1:-1], bias1, in_slabs=True)
            del part
            first.absorb(of_rows, start, end, kept_x)
            del of_rows, of_weight
        run.add_all(self.norm1.parameters(), first.finish())
        plus = (
            in_order(grad, length)
            if low_shortcut is None
            else _through_shortcut(in_order(grad, length), x, low_shortcut)
        )
        if isinstance(kept_x, Tensor):
            del h, kept_h, second, of_h_rows
            for start, end in [(0, x.shape[2])] if low_shortcut is None else all_slabs:
                first.input_grad(kept_x[:, :, start:end], start, end, read(plus, start, end))
            return kept_x
        back = ComputedRows(x, lambda start, end: _input_grad(of_h_rows, low_weight1, start, end), run.dtype)
        return NormGradRows(back if kept_x is None else kept_x, first, length, plus)

    def _around(self, x: Volume, dtype: torch.dtype) -> RowSource:
        """Return what is added to the convolutions: the input or its shortcut."""
        if self.shortcut is None:
            return ComputedRows(x, lambda start, end: read(x, start, end).to(dtype), dtype)
        if isinstance(x, ComputedRows) and x.then is not None:
            return x.then(self.shortcut)
        weight, bias = _low(self.shortcut, dtype)
        return ComputedRows(x, lambda start, end: F.conv3d(read(x, start, end).to(dtype), weight, bias), dtype)


def _low(conv: nn.Conv3d, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution in the dtype that it computes in."""
    assert conv.bias is not None, "MONAI's convolutions have a bias"
    return conv.weight.to(dtype), conv.bias.to(dtype)


def _norm(norm: nn.GroupNorm, statistics: Sequence[Tensor], silu: bool = True) -> Norm:
    mean, rstd = statistics
    return Norm(mean, rstd, norm.weight, norm.bias, silu)


def _places(x: Tensor, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return places for the gradient of x, for h, and for the gradient of h, which may share the memory of the first.

    The gradient of x is written slab by slab after the last use of h, so h can lie in it if it fits. If h has at most
    half the channels of x, its gradient fits too: channels last, at the end of each sample, where no slab but the last
    reaches rows that are still to be read.
    """
    grad_x = empty(x)
    if x.dtype != dtype or channels > x.shape[1]:
        return grad_x, empty(x, channels, dtype), empty(x, channels, dtype)
    if 2 * channels > x.shape[1] or layout_of(grad_x) != CHANNELS_LAST:
        return grad_x, grad_x[:, :channels], empty(x, channels, dtype)
    batch, _, *grid = x.shape
    values, count = grad_x.movedim(1, -1).view(batch, -1), math.prod(grid) * channels
    first, last = (part.view(batch, *grid, channels).movedim(-1, 1) for part in (values[:, :count], values[:, -count:]))
    return grad_x, first, last


def _input_grad(grad: Volume, weight: Tensor, start: int, end: int) -> Tensor:
    """Return some rows of the gradient of a convolution's input, from the rows of that of its output."""
    part = rows_of(grad, start - 1, end + 1).to(weight.dtype)
    # Only its shape and layout matter.
    x = empty(grad, weight.shape[1], weight.dtype, end - start)
    return convolve_backward(part, x, weight, (True, False))[0]


def _through_shortcut(grad: Volume, x: Volume, weight: Tensor) -> RowSource:
    """Return what the gradient of a shortcut's output gives to its input, a product with the weight, transposed."""
    back = weight.transpose(0, 1).contiguous(memory_format=layout_of_volume(x))
    return ComputedRows(x, lambda start, end: F.conv3d(rows_of(grad, start, end).to(back.dtype), back), weight.dtype)


class InputConvolution(LeanBlock):
    """The first convolution of an encoder, for slabs; its output is computed whenever it is read."""

    def __init__(self, stock: Convolution) -> None:
        super().__init__()
        self.conv = stock.conv

    @override
    def rows_forward(self, x: Volume, run: Run, is_last: bool) -> tuple[Volume, Found]:
        return convolved_rows(x, *_low(self.conv, run.dtype)), ()

    @override
    def rows_backward(self, x: Volume, statistics: Found, grad: Volume, run: Run, target: Target) -> Volume | None:
        weight, bias = self.conv.parameters()
        place = run.place(x, target)
        all_slabs = run.slabs(x, min(weight.shape[:2]))
        source, low_weight = with_halos(grad, all_slabs[0][1]), weight.to(run.dtype)
        for start, end in all_slabs:
            part = rows_of(source, start - 1, end + 1)
            needs = (place is not None, run.wants(weight))
            of_x, of_weight = convolve_backward(part, rows_of(x, start, end).to(run.dtype), low_weight, needs)
            run.add(weight, of_weight)
            run.add_biases(part[:, :, 1:-1], bias, in_slabs=True)
            if place is not None:
                write(place, start, of_x)
        return place


class Head(LeanBlock):
    """The last norm and convolution, without SiLU between them, as in MONAI."""

    def __init__(self, norm: nn.GroupNorm, conv: Convolution) -> None:
        super().__init__()
        self.norm, self.conv = norm, conv

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed and convolved volume."""
        if self.slab_rows:
            return in_slabs(x, [self], self.slab_rows)
        return self.conv(group_norm(x, self.norm))

    @override
    def rows_forward(self, x: Volume, run: Run, is_last: bool) -> tuple[Volume, Found]:
        mean, rstd = statistics_of(x, self.norm, run.rows)
        all_slabs = run.slabs(x, x.shape[1])
        source = with_halos(x, all_slabs[0][1])
        normed = NormedRows(source, _norm(self.norm, (mean, rstd), silu=False), run.dtype)
        weight, bias = _low(self.conv.conv, run.dtype)
        out = empty(x, weight.shape[0], run.dtype)
        for start, end in all_slabs:
            out[:, :, start:end] = convolve(normed.rows(start - 1, end + 1), weight, bias)
        return out, (mean, rstd)

    @override
    def rows_backward(self, x: Volume, statistics: Found, grad: Volume, run: Run, target: Target) -> Volume | None:
        """Add the gradients of the parameters; in host memory that of x, from few channels, is left to its reader."""
        weight, bias = self.conv.conv.parameters()
        all_slabs = run.slabs(x, x.shape[1])
        length, low_weight = all_slabs[0][1], weight.to(run.dtype)
        normed = NormedRows(with_halos(x, length), _norm(self.norm, statistics, silu=False), run.dtype)
        place = empty(x) if run.host is None else None
        run.add_biases(grad, bias)
        for start, end in all_slabs:
            part = rows_of(grad, start - 1, end + 1).to(run.dtype)
            of_rows, of_weight = convolve_backward(part, normed.rows(start, end), low_weight, (True, run.wants(weight)))
            run.add(weight, of_weight)
            run.add_biases(part[:, :, 1:-1], bias, in_slabs=True)
            normed.absorb(of_rows, start, end, place)
            del of_rows, of_weight
        run.add_all(self.norm.parameters(), normed.finish())
        if place is not None:
            normed.input_grad(place, 0, x.shape[2])
            return place

        def compute(start: int, end: int) -> Tensor:
            out = _input_grad(grad, low_weight, start, end)
            normed.input_grad(out, start, end)
            return out

        normed.x = with_halos(x, length)
        return ComputedRows(x, compute, run.dtype)


def resamples(block: nn.Module) -> bool:
    """Return whether a block, stock or lean, connects one level to the next."""
    return isinstance(block, Upsample | AEKLDownsample | UpsampleBlock | DownsampleBlock)


def lean_block(stock: nn.Module, strides: Strides = (2, 2, 2)) -> nn.Module:
    """Return the lean counterpart of a stock block; blocks without one are returned as they are.

    `strides` are those of a block that resamples.
    """
    if isinstance(stock, AEKLResBlock):
        return ResidualBlock(stock)
    if isinstance(stock, SpatialAttentionBlock):
        return AttentionBlock(stock)
    if isinstance(stock, Upsample):
        interpolates = stock.upsample_non_trainable.mode == "trilinear"
        return (InterpolationBlock if interpolates else UpsampleBlock)(stock, strides)
    if isinstance(stock, AEKLDownsample):
        return DownsampleBlock(stock, strides)
    assert isinstance(stock, Convolution | nn.GroupNorm), f"no lean counterpart for {type(stock).__name__}"
    return stock
