"""Small autoencoders, stock and lean, and pairs of them with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai.networks.blocks import Upsample
from monai.networks.nets import AutoencoderKL
from monai.networks.nets.autoencoderkl import AEKLDownsample
from torch import Tensor, nn
from torch.nn import functional as F

from settings import Settings


def settings_of(training: dict[str, Any] | None = None, **autoencoder: Any) -> Any:
    small = {"num_channels": [8, 16, 16], "norm_num_groups": 4, "num_res_blocks": 1}
    return Settings.model_validate(
        {"autoencoder": {**small, **autoencoder, "training": {"use_gradient_checkpointing": False, **(training or {})}}}
    ).autoencoder


def stock_like(settings: Any) -> AutoencoderKL:
    """MONAI's own class, built without any of our code."""
    return AutoencoderKL(
        spatial_dims=3,
        in_channels=settings.in_channels,
        out_channels=settings.in_channels,
        num_res_blocks=settings.res_blocks,
        channels=settings.num_channels,
        attention_levels=settings.attention_levels,
        latent_channels=settings.latent_channels,
        norm_num_groups=settings.num_groups,
        with_encoder_nonlocal_attn=settings.has_middle_attention,
        with_decoder_nonlocal_attn=settings.has_middle_attention,
        use_flash_attention=True,
    )


def downsampled(x: Tensor, conv: nn.Conv3d, strides: Sequence[int]) -> Tensor:
    """Pad as MONAI does along axes of stride two, and as any convolution of the same size along the others."""
    padding = [amount for stride in reversed(strides) for amount in ((0, 1) if stride == 2 else (1, 1))]
    return F.conv3d(F.pad(x, padding), conv.weight, conv.bias, stride=tuple(strides))


def upsampled(x: Tensor, conv: nn.Conv3d, strides: Sequence[int], mode: str = "nearest") -> Tensor:
    """Repeat or interpolate voxels along axes of stride two, then convolve."""
    larger = F.interpolate(x, scale_factor=tuple(map(float, strides)), mode=mode)
    return F.conv3d(larger, conv.weight, conv.bias, padding=1)


class PlainDownsample(nn.Module):
    def __init__(self, stock: AEKLDownsample, strides: Sequence[int]) -> None:
        super().__init__()
        self.conv, self.strides = stock.conv, strides

    def forward(self, x: Tensor) -> Tensor:
        return downsampled(x, self.conv.conv, self.strides)


class PlainUpsample(nn.Module):
    def __init__(self, stock: Upsample, strides: Sequence[int], mode: str) -> None:
        super().__init__()
        self.postconv, self.strides, self.mode = stock.postconv, strides, mode

    def forward(self, x: Tensor) -> Tensor:
        return upsampled(x, self.postconv.conv, self.strides, self.mode)


def plain_autoencoder(settings: Any) -> AutoencoderKL:
    """MONAI's own class with plain resampling blocks of the strides that the settings give, or told to interpolate."""
    network = stock_like(settings)
    down, up = list(settings.level_strides), list(reversed(settings.level_strides))
    for blocks in (network.encoder.blocks, network.decoder.blocks):
        for index, block in enumerate(blocks):
            if isinstance(block, AEKLDownsample):
                blocks[index] = PlainDownsample(block, down.pop(0))
            elif isinstance(block, Upsample):
                blocks[index] = PlainUpsample(block, up.pop(0), settings.upsampling)
    assert not down + up, "every stride has its block"
    return network
