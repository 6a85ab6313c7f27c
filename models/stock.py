"""MONAI's own autoencoder behind the interface that training uses, with a fix for levels without residual blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from monai.networks.blocks import Convolution, SpatialAttentionBlock, Upsample
from monai.networks.nets import AutoencoderKL
from monai.networks.nets.autoencoderkl import AEKLDownsample, AEKLResBlock
from torch import Tensor, nn

from models.bottleneck import VectorQuantiser
from models.lean.layout import CONTIGUOUS, LaidOut, arranged
from models.lean.norm import full_precision
from models.lean.rows import HostSpace

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
        if upsampling == "trilinear":
            interpolate_linearly(self.decoder.blocks)

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


def interpolate_linearly(blocks: nn.ModuleList) -> None:
    """Make all upsampling blocks of a decoder interpolate between voxels, as MAISI's do, instead of repeating them."""
    for block in blocks:
        if isinstance(block, Upsample):
            block.upsample_non_trainable.mode, block.upsample_non_trainable.align_corners = "trilinear", False


def match_channels(blocks: nn.ModuleList, groups: int, eps: float) -> None:
    """Rebuild each block whose number of input channels differs from the output of the block before it.

    A level with `num_res_blocks` 0 does not change the channels, but MONAI builds the next block as if it did, and that
    block fails on its input. Blocks that fit stay as they are, so a network that MONAI can run is not changed.
    """
    channels: int | None = None
    for index, block in enumerate(blocks):
        expected, produced = _channels_of(block)
        if channels is not None and expected != channels:
            blocks[index] = _rebuild(block, channels, produced, groups, eps)
        channels = produced if _changes_channels(block) else (channels or produced)


def _changes_channels(block: nn.Module) -> bool:
    return isinstance(block, Convolution | AEKLResBlock)


def _channels_of(block: nn.Module) -> Sequence[int]:
    if isinstance(block, AEKLResBlock):
        return block.in_channels, block.out_channels
    if isinstance(block, SpatialAttentionBlock):
        return (block.norm.num_channels,) * 2
    if isinstance(block, nn.GroupNorm):
        return (block.num_channels,) * 2
    conv = {Convolution: "conv", AEKLDownsample: "conv.conv", Upsample: "postconv.conv"}[type(block)]
    layer = block.get_submodule(conv)
    return layer.in_channels, layer.out_channels  # type: ignore[return-value]


def _rebuild(block: nn.Module, channels: int, produced: int, groups: int, eps: float) -> nn.Module:
    convolution = {"spatial_dims": 3, "kernel_size": 3, "padding": 1, "conv_only": True}
    if isinstance(block, AEKLResBlock):
        return AEKLResBlock(3, channels, groups, eps, produced)
    if isinstance(block, AEKLDownsample):
        return AEKLDownsample(3, channels)
    if isinstance(block, nn.GroupNorm):
        return nn.GroupNorm(groups, channels, eps)
    if isinstance(block, Convolution):
        return Convolution(in_channels=channels, out_channels=produced, **convolution)
    assert isinstance(block, Upsample), f"attention follows a residual block, so it always fits: {block}"
    return Upsample(
        3,
        channels,
        channels,
        scale_factor=2.0,
        mode="nontrainable",
        interp_mode="nearest",
        align_corners=None,
        post_conv=Convolution(in_channels=channels, out_channels=channels, **convolution),
    )
