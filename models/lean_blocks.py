"""MONAI's autoencoder blocks with the same parameters and the same function in less memory.

Each takes over the layers of one stock block under the names they have there, so state-dict keys stay MONAI's.
"""

from __future__ import annotations

from monai.networks.blocks import Convolution, SpatialAttentionBlock, Upsample
from monai.networks.nets.autoencoderkl import AEKLDownsample, AEKLResBlock
from torch import Tensor, nn
from torch.nn import functional as F

from models.attention import AttentionBlock
from models.group_norm import group_norm


class ResidualBlock(nn.Module):
    """Two times norm, SiLU and convolution, added to the input."""

    def __init__(self, stock: AEKLResBlock) -> None:
        super().__init__()
        self.norm1, self.conv1 = stock.norm1, stock.conv1
        self.norm2, self.conv2 = stock.norm2, stock.conv2
        self.nin_shortcut = stock.nin_shortcut

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(group_norm(x, self.norm1, silu=True))
        h = self.conv2(group_norm(h, self.norm2, silu=True))
        return self.nin_shortcut(x) + h


class UpsampleBlock(nn.Module):
    """Nearest-neighbour upsampling by two, then a convolution."""

    def __init__(self, stock: Upsample) -> None:
        super().__init__()
        self.postconv = stock.postconv

    def forward(self, x: Tensor) -> Tensor:
        return self.postconv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class DownsampleBlock(nn.Module):
    """A convolution of stride two over the input padded by one at each axis' end."""

    def __init__(self, stock: AEKLDownsample) -> None:
        super().__init__()
        self.conv = stock.conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1) * 3))


def lean_block(stock: nn.Module) -> nn.Module:
    """Return the lean counterpart of a stock block; blocks without one are returned as they are."""
    if isinstance(stock, AEKLResBlock):
        return ResidualBlock(stock)
    if isinstance(stock, SpatialAttentionBlock):
        return AttentionBlock(stock)
    if isinstance(stock, Upsample):
        return UpsampleBlock(stock)
    if isinstance(stock, AEKLDownsample):
        return DownsampleBlock(stock)
    assert isinstance(stock, Convolution | nn.GroupNorm), f"no lean counterpart for {type(stock).__name__}"
    return stock
