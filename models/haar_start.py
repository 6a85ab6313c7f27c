"""A start for the autoencoder that already passes detail: its latent begins as block means and their differences.

Random weights learn coarse structure first and detail last, because coarse structure has most of a volume's energy.
With this start the encoder computes the Haar transform of each block that a downsampling merges, the latent holds the
mean and the differences along the axes, and the decoder puts the differences back with the right sign. Residual blocks
begin as their shortcuts. Only the first values change: every weight is trained, and names and shapes stay MONAI's.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from monai.networks.blocks import Convolution
from torch import Tensor, nn

from models.lean.resampling import Strides
from models.stock import StockAutoencoder

# The sigma of the latent at the start, small beside means of about one.
SIGMA = 0.05
# Differences between neighbours are small, so they get a gain.
DIFFERENCE_GAIN = 3.0
# What remains of the random weights that stand beside the ones set here, so that no two channels stay alike.
REST = 0.3
# How strongly the decoder pulls the two halves of a block apart.
STEP = 0.7

_Axes = tuple[int, ...]


@torch.no_grad()
def start_as_haar_transform(autoencoder: StockAutoencoder, in_channels: int, strides: tuple[Strides, ...]) -> None:
    """Overwrite the first weights of an autoencoder of either implementation; `strides` are those of its levels."""
    encoder, decoder = autoencoder.encoder.blocks, autoencoder.decoder.blocks
    for block in (*encoder, *decoder):
        if hasattr(block, "conv2"):
            _start_as_shortcut(block)
    first = encoder[0].conv
    copies = min(8 * in_channels, first.out_channels)
    first.weight[:copies], first.bias[:copies] = 0, 0
    for channel in range(copies):
        first.weight[channel, channel % in_channels, 1, 1, 1] = 1
    merging = [block.conv.conv for block in encoder if not isinstance(block, Convolution) and hasattr(block, "conv")]
    for number, (conv, factors) in enumerate(zip(merging, strides, strict=True)):
        _transform(conv, factors, in_channels, is_first=number == 0)
    latent_channels = encoder[-1].conv.out_channels
    encoder[-1].conv.weight.mul_(REST**2)
    _add_centre(encoder[-1].conv, latent_channels)
    for conv in (autoencoder.quant_conv_mu.conv, autoencoder.post_quant_conv.conv):
        conv.weight[:], conv.bias[:] = 0, 0
        _add_centre(conv, latent_channels)
    if autoencoder.quantiser is None:
        autoencoder.quant_conv_log_sigma.conv.weight.zero_()
        autoencoder.quant_conv_log_sigma.conv.bias.fill_(2 * math.log(SIGMA))
    decoder[0].conv.weight.mul_(REST)
    _add_centre(decoder[0].conv, latent_channels)
    parting = [block.postconv.conv for block in decoder if hasattr(block, "postconv")]
    for number, conv in enumerate(parting):
        _part(conv, differences(strides[-1]) if number == 0 else [()], in_channels, latent_channels)


def differences(strides: Strides) -> list[_Axes]:
    """Return the Haar filters of a downsampling by the axes along which they take differences; the mean comes first."""
    axes = [axis for axis, factor in enumerate(strides) if factor == 2]
    return [chosen for size in range(len(axes) + 1) for chosen in itertools.combinations(axes, size)]


def haar_kernel(strides: Strides, along: _Axes) -> Tensor:
    """Return the 3x3x3 kernel of one filter, as the encoder's downsampling pads: a block of two is its first two taps.

    An axis that is not downsampled is left as it is, by the tap in the middle.
    """
    x, y, z = torch.tensor([[0.0, 1.0, 0.0]] * 3)
    for axis, line in enumerate((x, y, z)):
        if strides[axis] == 2:
            line[:2] = torch.tensor([-0.5 if axis in along else 0.5, 0.5])
    return x[:, None, None] * y[:, None] * z


def _start_as_shortcut(block: Any) -> None:
    block.conv2.conv.weight[:], block.conv2.conv.bias[:] = 0, 0
    shortcut = getattr(block.nin_shortcut, "conv", None)
    if shortcut is not None:
        kept = min(shortcut.weight.shape[:2])
        shortcut.weight.mul_(REST)
        shortcut.weight[:kept] = 0
        shortcut.weight[range(kept), range(kept)] = 1
        shortcut.bias.zero_()


def _transform(conv: nn.Conv3d, strides: Strides, in_channels: int, is_first: bool) -> None:
    """Make the leading channels the Haar transform of the volume, or of the means that the level above has passed."""
    filters = differences(strides)
    set_here = min(len(filters) * in_channels, conv.out_channels)
    assert conv.bias is not None, "MONAI's convolutions have biases"
    conv.weight[:set_here], conv.bias[:set_here] = 0, 0
    for channel in range(set_here):
        along = filters[channel // in_channels]
        source = channel if is_first else channel % in_channels
        gain = DIFFERENCE_GAIN if along else 1.0
        conv.weight[channel, source] = gain * haar_kernel(strides, along)


def _add_centre(conv: nn.Conv3d, period: int) -> None:
    """Add one to the middle tap from input `channel % period`, if there is one, to each output channel."""
    middle = tuple(size // 2 for size in conv.kernel_size)
    for channel in range(conv.out_channels):
        if channel % period < conv.in_channels:
            conv.weight[(channel, channel % period, *middle)] += 1


def _part(conv: nn.Conv3d, filters: list[_Axes], in_channels: int, latent_channels: int) -> None:
    """Let each channel pass its latent channel: a difference along one axis with opposite signs in the two halves."""
    conv.weight.mul_(REST)
    for channel in range(conv.out_channels):
        place = channel % latent_channels // in_channels
        along = filters[place] if place < len(filters) else ()
        if len(along) == 1:
            line = conv.weight[channel, channel].transpose(0, along[0])[:, 1, 1]
            line[0] += STEP
            line[2] -= STEP
        else:
            conv.weight[channel, channel, 1, 1, 1] += 1
