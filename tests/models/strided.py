"""MONAI's autoencoder with strides that differ by axis, in plain torch: what ours must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai.networks.blocks import Upsample
from monai.networks.nets import AutoencoderKL
from monai.networks.nets.autoencoderkl import AEKLDownsample
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.autoencoders import stock_like


def downsampled(x: Tensor, weight: Tensor, bias: Tensor | None, strides: Sequence[int]) -> Tensor:
    """Pad as MONAI does along axes of stride two, and as any convolution of the same size along the others."""
    padding = [amount for stride in reversed(strides) for amount in ((0, 1) if stride == 2 else (1, 1))]
    return F.conv3d(F.pad(x, padding), weight, bias, stride=tuple(strides))


def upsampled(x: Tensor, weight: Tensor, bias: Tensor | None, strides: Sequence[int]) -> Tensor:
    """Repeat voxels along axes of stride two, then convolve."""
    repeated = F.interpolate(x, scale_factor=tuple(float(stride) for stride in strides), mode="nearest")
    return F.conv3d(repeated, weight, bias, padding=1)


class PlainDownsample(nn.Module):
    def __init__(self, stock: AEKLDownsample, strides: Sequence[int]) -> None:
        super().__init__()
        self.conv, self.strides = stock.conv, strides

    def forward(self, x: Tensor) -> Tensor:
        return downsampled(x, self.conv.conv.weight, self.conv.conv.bias, self.strides)


class PlainUpsample(nn.Module):
    def __init__(self, stock: Upsample, strides: Sequence[int]) -> None:
        super().__init__()
        self.postconv, self.strides = stock.postconv, strides

    def forward(self, x: Tensor) -> Tensor:
        return upsampled(x, self.postconv.conv.weight, self.postconv.conv.bias, self.strides)


def strided_like(settings: Any) -> AutoencoderKL:
    """MONAI's own class with plain resampling blocks of the strides that the settings give."""
    network = stock_like(settings)
    down, up = list(settings.strides), list(reversed(settings.strides))
    for index, block in enumerate(network.encoder.blocks):
        if isinstance(block, AEKLDownsample):
            network.encoder.blocks[index] = PlainDownsample(block, down.pop(0))
    for index, block in enumerate(network.decoder.blocks):
        if isinstance(block, Upsample):
            network.decoder.blocks[index] = PlainUpsample(block, up.pop(0))
    assert not down, "every stride has its block"
    assert not up, "every stride has its block"
    return network
