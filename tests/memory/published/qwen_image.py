"""A network that allocates what the VAE of Qwen-Image does for one image (diffusers' AutoencoderKLQwenImage).

Written from its description: causal 3D convolutions padded by hand, RMS norms, one attention block in the middle,
nearest upsampling in fp32, and a cache of the features in front of every 3D convolution, which video decoding uses and
image decoding fills all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Network = TypeVar("Network", bound=nn.Module)
CHANNELS, LATENT_CHANNELS, MULTIPLIERS = 96, 16, (1, 2, 4, 4)


class Cache:
    """Keeps a copy of the last two frames in front of each convolution, which those of a video continue."""

    def __init__(self) -> None:
        self.kept: dict[nn.Module, Tensor] = {}
        self.is_first = True  # whether no frame came before these

    def keep(self, x: Tensor, convolution: nn.Module) -> Tensor | None:
        """Copy the last frames of `x` and keep the copy; return the frames before `x`, if there are any."""
        kept, before = x[:, :, -2:].clone(), self.kept.get(convolution)
        if before is not None and kept.shape[2] < 2:
            kept = torch.cat((before[:, :, -1:], kept), dim=2)
        self.kept[convolution] = kept
        return before


class CausalConvolution(nn.Conv3d):
    """A 3D convolution that sees the present frame and those before it."""

    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__(inputs, outputs, size)
        self._around = size // 2

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """Pad in front of the first frame and around the image; convolve."""
        around, missing = self._around, 2 * self._around
        if before is not None:
            x, missing = torch.cat((before, x), dim=2), missing - before.shape[2]
        return super().forward(F.pad(x, (around, around, around, around, missing, 0)))


class RmsNorm(nn.Module):
    """A norm over the channels, times a scale for each of them."""

    def __init__(self, channels: int, num_axes: int) -> None:
        super().__init__()
        self.factor = channels**0.5
        self.scale = nn.Parameter(torch.ones(channels, *(1,) * num_axes))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return F.normalize(x, dim=1) * self.factor * self.scale + 0.0


class ResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RmsNorm(inputs, 3), RmsNorm(outputs, 3)
        self.conv1, self.conv2 = CausalConvolution(inputs, outputs, 3), CausalConvolution(outputs, outputs, 3)
        self.shortcut = CausalConvolution(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Return the block's output."""
        shortcut = self.shortcut(x)
        for norm, convolution in ((self.norm1, self.conv1), (self.norm2, self.conv2)):
            x = norm(x)
            x = F.silu(x)
            x = convolution(x, cache.keep(x, convolution))
        return x + shortcut


class Attention(nn.Module):
    """Self-attention of one head over the pixels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RmsNorm(channels, 2)
        self.to_qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Return the image plus what attention adds to it."""
        batch, channels, frames, height, width = x.shape
        image = self.norm(x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width))
        qkv = self.to_qkv(image).reshape(batch * frames, 1, 3 * channels, -1).permute(0, 1, 3, 2).contiguous()
        attended = F.scaled_dot_product_attention(*qkv.chunk(3, dim=-1))
        image = self.proj(attended.squeeze(1).permute(0, 2, 1).reshape(batch * frames, channels, height, width))
        return image.view(batch, frames, channels, height, width).permute(0, 2, 1, 3, 4) + x


class Resample(nn.Module):
    """Halve or double an image; levels that resample time, too, have weights for it and, going down, fill the cache."""

    def __init__(self, channels: int, is_up: bool, has_time: bool) -> None:
        super().__init__()
        self.is_up, self.has_time = is_up, has_time
        if has_time:
            self.time = nn.Conv3d(channels, 2 * channels if is_up else channels, (3, 1, 1))
        self.conv = nn.Conv2d(channels, channels // 2, 3, padding=1) if is_up else nn.Conv2d(channels, channels, 3, 2)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Return the image at its new size."""
        if self.is_up and self.has_time:
            x = self._more_frames(x, cache)
        batch, channels, frames, height, width = x.shape
        image = x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width)
        if self.is_up:
            image = F.interpolate(image.float(), scale_factor=2, mode="nearest-exact").type_as(image)
        else:
            image = F.pad(image, (0, 1, 0, 1))
        image = self.conv(image)
        video = image.view(batch, frames, *image.shape[1:]).permute(0, 2, 1, 3, 4)
        if self.has_time and not self.is_up:
            cache.keep(video, self)
        return video

    def _more_frames(self, x: Tensor, cache: Cache) -> Tensor:
        """Return two frames for each one; the first frame of a video stays one."""
        if cache.is_first:
            return x
        batch, channels, frames, height, width = x.shape
        before = cache.keep(x, self)
        x = x if before is None else torch.cat((before, x), dim=2)
        x = F.pad(x, (0, 0, 0, 0, frames + 2 - x.shape[2], 0))
        x = self.time(x).reshape(batch, 2, channels, frames, height, width)
        return torch.stack((x[:, 0], x[:, 1]), 3).reshape(batch, channels, 2 * frames, height, width)


class Level(nn.Module):
    """The blocks of one level, whose input stays alive until the level is done."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x, cache)
        return x


def middle(channels: int) -> Level:
    """Return two residual blocks with attention between them."""
    return Level([ResidualBlock(channels, channels), Attention(channels), ResidualBlock(channels, channels)])


class Half(nn.Module):
    """The encoder or the decoder: a convolution, blocks, a norm and a convolution."""

    def __init__(self, inputs: int, first: int, blocks: list[nn.Module], last: int, outputs: int) -> None:
        super().__init__()
        self.conv_in, self.conv_out = CausalConvolution(inputs, first, 3), CausalConvolution(last, outputs, 3)
        self.blocks, self.norm = nn.ModuleList(blocks), RmsNorm(last, 3)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        """Run all blocks."""
        x = self.conv_in(x, cache.keep(x, self.conv_in))
        for block in self.blocks:
            x = block(x, cache)
        x = self.norm(x)
        x = F.silu(x)
        return self.conv_out(x, cache.keep(x, self.conv_out))


class QwenImageVae(nn.Module):
    """Encoder and decoder for one image; frames are there but only one."""

    def __init__(self) -> None:
        super().__init__()
        widths = [CHANNELS * factor for factor in (1, *MULTIPLIERS)]
        down: list[nn.Module] = []
        for level, (inputs, outputs) in enumerate(pairwise(widths)):
            down += [ResidualBlock(inputs, outputs), ResidualBlock(outputs, outputs)]
            down += [Resample(outputs, is_up=False, has_time=level > 0)] if level < len(MULTIPLIERS) - 1 else []
        self.encoder = Half(3, widths[0], [*down, middle(widths[-1])], widths[-1], 2 * LATENT_CHANNELS)
        self.quant = CausalConvolution(2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, 1)
        self.post_quant = CausalConvolution(LATENT_CHANNELS, LATENT_CHANNELS, 1)
        widths = [CHANNELS * factor for factor in (MULTIPLIERS[-1], *reversed(MULTIPLIERS))]
        up: list[nn.Module] = [middle(widths[0])]
        for level, (inputs, outputs) in enumerate(pairwise(widths)):
            first = inputs // 2 if level else inputs
            blocks: list[nn.Module] = [ResidualBlock(first, outputs)]
            blocks += [ResidualBlock(outputs, outputs), ResidualBlock(outputs, outputs)]
            blocks += [Resample(outputs, is_up=True, has_time=level < 2)] if level < len(MULTIPLIERS) - 1 else []
            up.append(Level(blocks))
        self.decoder = Half(LATENT_CHANNELS, widths[0], up, widths[-1], 3)

    def decode(self, latent: Tensor) -> Tensor:
        """Return the image of a latent, both with one frame."""
        cache = Cache()
        latent = self.post_quant(latent)
        return self.decoder(latent, cache).clamp(-1.0, 1.0)

    def decode_video(self, latent: Tensor) -> Tensor:
        """Return the video of a latent: of its first frame one frame, of each other one four."""
        latent = self.post_quant(latent)
        cache, frames = Cache(), latent.split(1, dim=2)
        video = self.decoder(frames[0], cache)
        cache.is_first = False
        for frame in frames[1:]:
            video = torch.cat((video, self.decoder(frame, cache)), dim=2)
        return video.clamp(-1.0, 1.0)

    def encode_video(self, video: Tensor) -> Tensor:
        """Return what `encode` does of a video: its first frame, then four at a time."""
        cache, (first, *others) = Cache(), video.split([1, *(4,) * (video.shape[2] // 4)], dim=2)
        encoded = self.encoder(first, cache)
        cache.is_first = False
        for frames in others:
            encoded = torch.cat((encoded, self.encoder(frames, cache)), dim=2)
        return self.quant(encoded)

    def encode(self, image: Tensor) -> Tensor:
        """Return mean and logarithm of the variance of a latent."""
        cache = Cache()
        encoded = self.encoder(image, cache)
        return self.quant(encoded)


def in_half(build: Callable[[], Network]) -> Network:
    """Return a network with fp16 weights; fake weights cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def qwen_in_half() -> QwenImageVae:
    """Return the network with fp16 weights."""
    return in_half(QwenImageVae)
