"""MONAI's own autoencoder behind the interface that training uses, with a fix for levels without residual blocks."""

from __future__ import annotations

import logging
from typing import Any

import torch
from monai.networks.blocks import Convolution, Upsample
from monai.networks.nets import AutoencoderKL
from monai.networks.nets.autoencoderkl import AEKLDownsample, AEKLResBlock
from torch import Tensor, nn

from models.bottleneck import VectorQuantiser
from models.lean.layout import CONTIGUOUS, LaidOut, arranged
from models.lean.norm import full_precision
from models.lean.rows import HostSpace
from settings import AutoencoderSettings

log = logging.getLogger(__name__)

ENCODER_PARTS = ("encoder.", "quant_conv_mu.", "quant_conv_log_sigma.")
"""How the names of the parameters start that a latent depends on."""


class StockAutoencoder(AutoencoderKL, LaidOut):
    """MONAI's `AutoencoderKL` with attention through SDPA and with optional noise from the caller.

    `upsampling` is nearest or trilinear. `value_range` is that of volumes inside the network, symmetric ([-1, 1]) or
    unit ([0, 1]); outside it they are in [-1, 1].
    """

    fastest_layout = CONTIGUOUS  # GroupNorm on CUDA copies everything else into it

    def __init__(self, upsampling: str = "nearest", value_range: str = "symmetric", **arguments: Any) -> None:
        super().__init__(use_flash_attention=True, **arguments)
        self.value_range, self.encoder_is_frozen = value_range, False
        self.quantiser: VectorQuantiser | None = None
        for coder in (self.encoder, self.decoder):
            match_channels(coder.blocks, coder.norm_num_groups, coder.norm_eps)
        for block in self.decoder.blocks if upsampling == "trilinear" else ():
            if isinstance(block, Upsample):  # interpolates between voxels, as MAISI's, instead of repeating them
                block.upsample_non_trainable.mode, block.upsample_non_trainable.align_corners = "trilinear", False

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction, the latent's mean and its sigma; the latent is `mean + sigma * noise`."""
        with self.encoder_gradients():
            mean, sigma = self.encode(x)
        if noise is None:
            # Not `randn_like`: it draws in memory order, so its numbers would depend on the layout.
            noise = torch.randn(sigma.shape, dtype=sigma.dtype, device=sigma.device)
        return self.decode(mean + sigma * noise), mean, sigma

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latent's mean and sigma."""
        return super().encode(arranged(self.entering(x), self.layout))

    def decode(self, z: Tensor) -> Tensor:
        """Return the volume of a latent."""
        return self.leaving(super().decode(arranged(z, self.layout)))

    def entering(self, x: Tensor) -> Tensor:
        """Bring a volume from [-1, 1] to the range that the weights expect."""
        return x if self.value_range == "symmetric" else (x + 1) / 2

    def leaving(self, y: Tensor) -> Tensor:
        """Bring a decoded volume back to [-1, 1]; in full precision, where values near zero keep their digits."""
        return y if self.value_range == "symmetric" else full_precision(y) * 2 - 1

    def encoder_gradients(self) -> torch.set_grad_enabled:
        """Return the context of a pass through the encoder; without gradients, a frozen one keeps no activations."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and not self.encoder_is_frozen)

    def freeze_encoder(self) -> None:
        """Train the decoder only: the encoder and the convolutions after it get no gradients."""
        self.encoder_is_frozen = True
        for name, parameter in self.named_parameters():
            if name.startswith(ENCODER_PARTS):
                parameter.requires_grad_(False)

    def gradient_checkpointing_enable(
        self, levels: int | str = "all", offload: bool = False, nested: bool = False
    ) -> None:
        """Turn on MONAI's own checkpointing, which always covers the whole encoder and the whole decoder."""
        assert (levels, offload, nested) == ("all", False, False), "stock blocks have no such knobs"
        self.use_checkpoint = True
        log.info("gradient checkpointing on: MONAI's own, the encoder and the decoder as one block each")

    def gradient_checkpointing_disable(self) -> None:
        """Turn MONAI's own checkpointing off."""
        self.use_checkpoint = False
        log.info("gradient checkpointing off: MONAI's encoder and decoder keep all activations")

    def set_slab_rows(self, rows: int, num_levels: int = 1, host: HostSpace | None = None) -> None:
        """Accept only 0, because stock blocks cannot run in slabs."""
        assert (rows, host) == (0, None), "the stock autoencoder has no slabs"

    def offload_levels(self, num_levels: int, rows: int = 0, nested: bool = False) -> None:
        """Accept only 0, because stock blocks cannot read rows from the host."""
        assert num_levels == 0, "the stock autoencoder keeps its volumes on the device"


def autoencoder_arguments(settings: AutoencoderSettings) -> dict[str, Any]:
    """Return the arguments of `AutoencoderKL`, which has no strides but 2."""
    return {
        "spatial_dims": 3,
        "in_channels": settings.in_channels,
        "out_channels": settings.in_channels,
        "channels": settings.num_channels,
        "num_res_blocks": settings.res_blocks,
        "attention_levels": settings.attention_levels,
        "latent_channels": settings.latent_channels,
        "norm_num_groups": settings.num_groups,
        "with_encoder_nonlocal_attn": settings.has_middle_attention,
        "with_decoder_nonlocal_attn": settings.has_middle_attention,
    }


def match_channels(blocks: nn.ModuleList, groups: int, eps: float) -> None:
    """Rebuild each block whose number of input channels differs from the output of the block before it.

    A level with `num_res_blocks` 0 does not change the channels, but MONAI builds the next block as if it did, and that
    block fails on its input. Blocks that fit stay as they are, so a network that MONAI can run is not changed.
    """
    channels: Any = None
    for index, block in enumerate(blocks):
        first = next(part for part in block.modules() if isinstance(part, nn.Conv3d | nn.GroupNorm))
        expected = first.num_channels if isinstance(first, nn.GroupNorm) else first.in_channels
        if channels is not None and expected != channels:
            blocks[index] = _rebuild(block, channels, groups, eps)
        is_free = isinstance(block, Convolution | AEKLResBlock)  # others have as many outputs as inputs
        channels = block.out_channels if is_free else channels or expected


def _rebuild(block: nn.Module, channels: int, groups: int, eps: float) -> nn.Module:
    """Return a block like this one for another number of input channels."""
    if isinstance(block, AEKLResBlock):
        return AEKLResBlock(3, channels, groups, eps, block.out_channels)
    if isinstance(block, nn.GroupNorm):
        return nn.GroupNorm(groups, channels, eps)
    assert isinstance(block, Convolution | AEKLDownsample | Upsample), "attention follows a block that fits"
    is_free = isinstance(block, Convolution)
    wrapper = block if is_free else block.postconv if isinstance(block, Upsample) else block.conv
    conv = wrapper.conv
    wrapper.conv = nn.Conv3d(
        channels, conv.out_channels if is_free else channels, conv.kernel_size, conv.stride, conv.padding
    )
    return block
