"""MONAI's autoencoder blocks with the same parameters and the same function in less memory.

Each lean block holds the layers of one stock block under the same names, so the state-dict keys stay MONAI's.
"""

from __future__ import annotations

import torch
from monai.networks.blocks import Convolution, SpatialAttentionBlock, Upsample
from monai.networks.nets.autoencoderkl import AEKLDownsample, AEKLResBlock
from torch import Tensor, nn
from torch.nn import functional as F

from models.lean.attention import AttentionBlock
from models.lean.host_volumes import HostSpace
from models.lean.interpolation import interpolated_conv, interpolated_rows
from models.lean.layout import CHANNELS_LAST, layout_of
from models.lean.norm import compute_dtype, group_norm
from models.lean.offloaded_levels import (
    DownsampleStage,
    FirstConvolution,
    HeadStage,
    InterpolationStage,
    ResidualStage,
    Stage,
    UpsampleStage,
)
from models.lean.resampling import DownsampledRows, Strides, UpsampledRows, downsample_conv, upsample_conv
from models.lean.slab_blocks import norm_conv, residual
from models.lean.slabs import RowSource, Volume
from models.lean.streaming import Layers, Residual, residual_on_host, stored
from runtime.observer import runs_on_cpu


class LeanBlock(nn.Module):
    """A block that runs whole, or in slabs of `slab_rows` rows if that is not 0.

    Without gradients, large volumes lie in the memory of `host`, if it is given.
    """

    slab_rows = 0
    host: HostSpace | None = None

    @property
    def keeps_only_input(self) -> bool:
        """Whether the block keeps only its input for backward, so that a checkpoint around it would gain nothing."""
        return self.slab_rows > 0

    def consume(self, x: Volume) -> Volume:
        """Run the block in slabs without gradients; `x` may be overwritten, because the caller no longer needs it."""
        return self(x)


def pointwise_conv(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """Apply a 1x1x1 convolution and keep the layout of `x`.

    On one thread, torch's own convolution on a CPU copies a channels-last fp32 volume into the other layout and stays
    there, forward and backward; there the matrix product of all voxels with the weight takes its place.
    """
    if runs_on_cpu(x) and compute_dtype(x) == torch.float32 and layout_of(x) == CHANNELS_LAST:
        return F.linear(x.movedim(1, -1), conv.weight.flatten(1), conv.bias).movedim(-1, 1)
    return conv(x)


class ResidualBlock(LeanBlock):
    """Norm, SiLU and convolution, twice, added to the input."""

    def __init__(self, stock: AEKLResBlock) -> None:
        super().__init__()
        self.norm1, self.conv1 = stock.norm1, stock.conv1
        self.norm2, self.conv2 = stock.norm2, stock.conv2
        self.nin_shortcut = stock.nin_shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        if self.slab_rows:
            return self._in_slabs(x, overwrite=False)
        h = self.conv1.conv(group_norm(x, self.norm1, silu=True))
        h = group_norm(h, self.norm2, silu=True)
        # Ahead of the last convolution, which a checkpoint then skips: it stops once it has what backward needs.
        if isinstance(self.nin_shortcut, Convolution):
            x = pointwise_conv(x, self.nin_shortcut.conv)
        return x + self.conv2.conv(h)

    def consume(self, x: Volume) -> Volume:
        """Return the block's output, in the memory of its input if it fits."""
        dtype, channels = compute_dtype(x), self.conv2.conv.out_channels
        size = x.shape.numel() // x.shape[1] * channels * dtype.itemsize
        if self.host is None or size <= self.host.above:
            return self._in_slabs(x, overwrite=True)
        return residual_on_host(x, Residual.of(self.layers, dtype), self.slab_rows, self.host)[0]

    @property
    def layers(self) -> Layers:
        """Return the norms, the convolutions and the shortcut, if there is one."""
        convs = (self.conv1.conv, self.conv2.conv)
        return (self.norm1, self.norm2), convs, getattr(self.nin_shortcut, "conv", None)

    def _in_slabs(self, x: Volume, overwrite: bool) -> Tensor:
        return residual(x, *self.layers, self.slab_rows, overwrite)


class UpsampleBlock(LeanBlock):
    """Nearest-neighbour upsampling by `strides`, in MONAI's block two along each axis, then a convolution."""

    def __init__(self, stock: Upsample, strides: Strides = (2, 2, 2)) -> None:
        super().__init__()
        self.postconv, self.strides = stock.postconv, tuple(strides)

    def forward(self, x: Tensor) -> Tensor:
        """Return the enlarged volume."""
        return upsample_conv(x, self.postconv.conv, self.strides)

    def consume(self, x: Volume) -> RowSource:
        """Return the upsampled volume as rows computed on demand, which the next block reads in slabs."""
        conv = self.postconv.conv
        return UpsampledRows(x, conv.weight, conv.bias, self.strides, compute_dtype(x))

    @property
    def keeps_only_input(self) -> bool:
        """Always true: backward needs only the input, in slabs or not."""
        return True


class InterpolationBlock(UpsampleBlock):
    """Trilinear upsampling by `strides`, then a convolution."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the enlarged volume."""
        return interpolated_conv(x, self.postconv.conv, self.strides, self.slab_rows)

    def consume(self, x: Volume) -> RowSource:
        """Return the enlarged volume as rows computed on demand, which the next block reads in slabs."""
        conv = self.postconv.conv
        return interpolated_rows(x, conv.weight, conv.bias, self.strides, compute_dtype(x))


class DownsampleBlock(LeanBlock):
    """A convolution with `strides`, in MONAI's block two along each axis.

    The input is padded by one voxel: at the end of an axis with stride two, at both ends of an axis with stride one.
    """

    def __init__(self, stock: AEKLDownsample, strides: Strides = (2, 2, 2)) -> None:
        super().__init__()
        self.conv, self.strides = stock.conv, tuple(strides)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shrunk volume."""
        return downsample_conv(x, self.conv.conv, self.strides)

    def consume(self, x: Volume) -> Volume:
        """Return the shrunk volume, computed from rows if `x` is not on the device."""
        if isinstance(x, Tensor):
            return self(x)
        conv = self.conv.conv
        rows = DownsampledRows(x, conv.weight, conv.bias, self.strides, compute_dtype(x))
        return stored(rows, max(1, self.slab_rows // self.strides[0]), self.host)

    @property
    def keeps_only_input(self) -> bool:
        """Always true: backward needs only the input, in slabs or not."""
        return True


class Head(LeanBlock):
    """The last norm and convolution, without SiLU between them, as in MONAI."""

    def __init__(self, norm: nn.GroupNorm, conv: Convolution) -> None:
        super().__init__()
        self.norm, self.conv = norm, conv

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed and convolved volume."""
        if self.slab_rows:
            return norm_conv(x, self.norm, self.conv.conv, self.slab_rows)
        return self.conv(group_norm(x, self.norm))


def interpolates(stock: Upsample) -> bool:
    """Return whether a stock block interpolates between voxels instead of repeating them."""
    return stock.upsample_non_trainable.mode == "trilinear"


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
        return (InterpolationBlock if interpolates(stock) else UpsampleBlock)(stock, strides)
    if isinstance(stock, AEKLDownsample):
        return DownsampleBlock(stock, strides)
    assert isinstance(stock, Convolution | nn.GroupNorm), f"no lean counterpart for {type(stock).__name__}"
    return stock


def stage_of(block: nn.Module) -> Stage:
    """Return the form of a block in which its volumes lie in host memory."""
    if isinstance(block, ResidualBlock):
        return ResidualStage(block.layers)
    if isinstance(block, InterpolationBlock):
        return InterpolationStage(block.postconv.conv, block.strides)
    if isinstance(block, UpsampleBlock):
        return UpsampleStage(block.postconv.conv, block.strides)
    if isinstance(block, DownsampleBlock):
        return DownsampleStage(block.conv.conv, block.strides)
    if isinstance(block, Head):
        return HeadStage(block.norm, block.conv.conv)
    assert isinstance(block, Convolution), f"{type(block).__name__} cannot run on rows in host memory"
    return FirstConvolution(block.conv)
