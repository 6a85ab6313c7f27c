"""The diffusion U-Net of stage 2: MONAI's network and parameters, with checkpointing per block and lean norms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from monai.networks.blocks import SpatialAttentionBlock
from monai.networks.nets import DiffusionModelUNet
from monai.networks.nets.diffusion_model_unet import (
    DiffusionUnetDownsample,
    DiffusionUNetResnetBlock,
    WrappedUpsample,
    get_timestep_embedding,
)
from torch import Tensor, nn
from torch.nn import functional as F

from models.lean import native
from models.lean.attention import AttentionBlock
from models.lean.checkpointing import HostOffload, gradient_checkpoint_forward
from models.lean.layout import CONTIGUOUS, LaidOut, arranged, layout_of
from models.lean.norm import group_norm
from models.lean.resampling import UpsampleBlock, upsample_conv
from settings import LdmSettings
from settings.conditioning import WIDTHS

log = logging.getLogger(__name__)

Run = Callable[..., Tensor]
"""Calls a block with its inputs."""

SCAN_LAYERS = {
    "top_region": "top_region_index_layer",
    "bottom_region": "bottom_region_index_layer",
    "spacing": "spacing_layer",
}
"""MAISI's names of the layers that embed what it takes of a scan."""


class _Concatenated(torch.autograd.Function):
    """Channels of `x`, then those of `skip`, whose gradient is copied: a view of it would keep the whole alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor) -> Tensor:
        ctx.channels = x.shape[1]
        return torch.cat([x, skip], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_skip = grad.split_with_sizes((ctx.channels, grad.shape[1] - ctx.channels), dim=1)
        return of_x, of_skip.clone(memory_format=layout_of(of_skip))


def _pairs(x: Tensor) -> Tensor:
    """View a volume of even size as (batch, channels, rows, 2, height, 2, width, 2)."""
    return x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))


def _beside(x: Tensor) -> Tensor:
    """View a volume so that it can be broadcast over the `_pairs` of a volume twice its size."""
    return x[:, :, :, None, :, None, :, None]


def _over_pairs(x: Tensor, reduce: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Tensor:
    """Reduce each block of 2x2x2 voxels to one; keep the layout."""
    if layout_of(x) == CONTIGUOUS:
        return reduce(_pairs(x), (3, 5, 7))
    # Reductions return contiguous tensors, so the channels come last in the view.
    return reduce(_pairs(x).movedim(1, -1), (2, 4, 6)).movedim(-1, 1)


class _AddUpsampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, large: Tensor, small: Tensor) -> Tensor:
        ctx.dtypes = large.dtype, small.dtype
        dtype = torch.promote_types(*ctx.dtypes)
        out = torch.empty(large.shape, dtype=dtype, device=large.device, memory_format=layout_of(large))
        torch.add(_pairs(large), _beside(small), out=_pairs(out))
        return out

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_large, of_small = ctx.dtypes
        needs_large, needs_small = ctx.needs_input_grad
        return (
            grad.to(of_large) if needs_large else None,
            _over_pairs(grad, torch.sum).to(of_small) if needs_small else None,
        )


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.layout = layout_of(x)
        return _over_pairs(x, torch.mean)

    @staticmethod
    @native.first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        batch, channels, *grid = grad.shape
        shape = (batch, channels, *(2 * size for size in grid))
        out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.layout)
        _pairs(out).copy_(_beside(grad / 8))
        return (out,)


def add_upsampled(large: Tensor, small: Tensor) -> Tensor:
    """Add each voxel of `small` to the matching 2x2x2 voxels of `large`, without an enlarged copy.

    torch's own nearest-neighbour upsampling copies a channels-last volume into the other layout.
    """
    return _AddUpsampled.apply(large, small)


def halved(x: Tensor) -> Tensor:
    """Average each block of 2x2x2 voxels; every axis has an even size.

    torch's own pooling copies a channels-last volume into the other layout.
    """
    return _Halved.apply(x)


class TimeResidualBlock(nn.Module):
    """MONAI's residual block with timestep embedding, with the same layers; concatenates a skip connection itself."""

    def __init__(self, stock: DiffusionUNetResnetBlock) -> None:
        super().__init__()
        self.up, self.down = stock.up, stock.down
        self.norm1, self.conv1, self.time_emb_proj = stock.norm1, stock.conv1, stock.time_emb_proj
        self.norm2, self.conv2, self.skip_connection = stock.norm2, stock.conv2, stock.skip_connection

    def forward(self, x: Tensor, embedding: Tensor, skip: Tensor | None = None) -> Tensor:
        """Return the block's output for `x`, or for `x` and `skip` concatenated along the channels."""
        if skip is not None:
            x = _Concatenated.apply(x, skip)
        h = group_norm(x, self.norm1, silu=True)
        if self.down:
            x, h = halved(x), halved(h)
        h = upsample_conv(h, self.conv1.conv) if self.up else self.conv1.conv(h)
        shift = self.time_emb_proj(F.silu(embedding))
        h = h + shift.view(*shift.shape, 1, 1, 1)
        h = self.conv2.conv(group_norm(h, self.norm2, silu=True))
        if self.up:
            # The skip connection treats each voxel by itself, so it may come before the upsampling.
            return add_upsampled(h, self.skip_connection(x))
        return self.skip_connection(x) + h


class DiffusionUNet(DiffusionModelUNet, LaidOut):
    """MONAI's `DiffusionModelUNet` with self-attention only; every block can be checkpointed.

    With a `mean_map_shape` (C, D, H, W) it has a buffer (1, C, D, H, W), the mean of the latents that it is trained on,
    and concatenates it to every input: convolution and attention do not know where in the volume they are. With
    `num_numbers` it takes that many numbers, whose embedding is added to that of the timestep. With the names of
    `scan_inputs` it is MAISI's `DiffusionModelUNetMaisi`: the embedding of each input is appended to that of the
    timestep, so every residual block projects a longer one.
    """

    mean_map: Tensor | None

    def __init__(
        self,
        num_numbers: int = 0,
        scan_inputs: Sequence[str] = (),
        mean_map_shape: Sequence[int] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(use_flash_attention=True, **arguments)
        self.register_buffer("mean_map", None if mean_map_shape is None else torch.zeros(1, *mean_map_shape))
        for name, module in list(self.named_modules()):
            lean: nn.Module | None = None
            if isinstance(module, DiffusionUNetResnetBlock):
                lean = TimeResidualBlock(module)
            elif isinstance(module, SpatialAttentionBlock):
                lean = AttentionBlock(module)
            elif isinstance(module, WrappedUpsample) and not name.endswith("upsample"):
                lean = UpsampleBlock(module)
            if lean is not None:
                parent, _, child = name.rpartition(".")
                setattr(self.get_submodule(parent), child, lean)
        width = self.time_embed[0].out_features
        self.number_embedding: nn.Module | None = _embedding(num_numbers, width) if num_numbers else None
        self.scan_inputs = tuple(scan_inputs)
        for name in self.scan_inputs:
            setattr(self, SCAN_LAYERS[name], _embedding(WIDTHS[name], width))
        for block in self.modules() if self.scan_inputs else ():
            if isinstance(block, TimeResidualBlock):
                in_features = width * (1 + len(self.scan_inputs))
                block.time_emb_proj = nn.Linear(in_features, block.time_emb_proj.out_features)
        self.checkpointed = self.offload = False

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor | None = None,
        class_labels: Tensor | None = None,
        numbers: Tensor | None = None,
        scan: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction for `x`, the noisy latent and what is concatenated to it.

        A class-conditional network needs `class_labels`, one with numbers needs `numbers`, and one with scan inputs
        needs `scan`, which has their numbers side by side.
        """
        assert context is None, "the network has self-attention only: it takes no context"
        embedding = self._with_scan(self._embed(x, timesteps, class_labels, numbers), scan)
        run = self.runner()
        skips = self.encode(self._with_mean_map(arranged(x, self.layout)), embedding, run)
        return self.decode(self.middle(skips[-1], embedding, run), skips, embedding, run)

    def runner(self) -> Run:
        """Return what calls the blocks of one pass, checkpointed if that is on."""
        offload = HostOffload() if self.offload else False

        def run(block: nn.Module, *args: Tensor) -> Tensor:
            if not self.checkpointed:
                return block(*args)
            return gradient_checkpoint_forward(
                block,
                *args,
                use_gradient_checkpointing=True,
                use_gradient_checkpointing_offload=offload,
            )

        return run

    def encode(self, h: Tensor, embedding: Tensor, run: Run, control: Tensor | None = None) -> list[Tensor]:
        """Return what the skip connections carry, the last to the middle block too; `control` joins the first."""
        h = self.conv_in(h) if control is None else self.conv_in(h) + control
        skips = [h]
        for level in self.down_blocks:
            attentions = getattr(level, "attentions", [None] * len(level.resnets))
            for block, attention in zip(level.resnets, attentions, strict=True):
                h = run(block, h, embedding)
                h = h if attention is None else run(attention, h)
                skips.append(h)
            if level.downsampler is not None:
                h = run(level.downsampler, *_inputs(level.downsampler, h, embedding))
                skips.append(h)
        return skips

    def middle(self, h: Tensor, embedding: Tensor, run: Run) -> Tensor:
        """Return the output of the middle block."""
        middle = self.middle_block
        return run(middle.resnet_2, run(middle.attention, run(middle.resnet_1, h, embedding)), embedding)

    def decode(self, h: Tensor, skips: list[Tensor], embedding: Tensor, run: Run) -> Tensor:
        """Return the prediction from the output of the middle block and what `encode` returned, which it uses up."""
        for level in self.up_blocks:
            attentions = getattr(level, "attentions", [None] * len(level.resnets))
            for block, attention in zip(level.resnets, attentions, strict=True):
                h = run(block, h, embedding, skips.pop())
                h = h if attention is None else run(attention, h)
            if level.upsampler is not None:
                h = run(level.upsampler, *_inputs(level.upsampler, h, embedding))
        norm, _, conv = self.out
        return conv(group_norm(h, norm, silu=True))

    def _with_mean_map(self, x: Tensor) -> Tensor:
        """Return the input followed by the mean of the latents, padded with zeros at the far end as the input is."""
        if self.mean_map is None:
            return x
        mean_map = padded(self.mean_map.to(x.dtype), x.shape[2:])
        # Not expanded, because concatenation would then lose the layout.
        return torch.cat([x, torch.cat([mean_map] * len(x))], dim=1)

    def _embed(self, x: Tensor, timesteps: Tensor, class_labels: Tensor | None, numbers: Tensor | None) -> Tensor:
        embedding = self.time_embed(get_timestep_embedding(timesteps, self.block_out_channels[0]).to(x.dtype))
        if self.number_embedding is not None:
            assert numbers is not None, "numbers are missing: the network is conditioned on them"
            embedding = embedding + self.number_embedding(numbers.to(x.dtype))
        if self.num_class_embeds is None:
            return embedding
        assert class_labels is not None, "class_labels are missing: the network is class-conditional"
        return embedding + self.class_embedding(class_labels).to(x.dtype)

    def _with_scan(self, embedding: Tensor, scan: Tensor | None) -> Tensor:
        """Return the embedding followed by those of the scan inputs."""
        if not self.scan_inputs:
            return embedding
        assert scan is not None, "scan is missing: the network takes inputs of its scans"
        numbers = scan.to(embedding.dtype).split([WIDTHS[name] for name in self.scan_inputs], dim=1)
        layers = [self.get_submodule(SCAN_LAYERS[name]) for name in self.scan_inputs]
        return torch.cat([embedding, *(layer(part) for layer, part in zip(layers, numbers, strict=True))], dim=1)

    def gradient_checkpointing_enable(self, offload: bool = False) -> None:
        """Recompute every block in backward instead of keeping its activations; acts in training with gradients on."""
        self.checkpointed, self.offload = True, offload
        kinds = (TimeResidualBlock, AttentionBlock, DiffusionUnetDownsample, UpsampleBlock)
        covered = sum(isinstance(module, kinds) for module in self.modules())
        where = ", block inputs in host memory" if offload else ""
        log.info("gradient checkpointing on: %d blocks of the diffusion U-Net%s", covered, where)

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations for backward again."""
        self.checkpointed = self.offload = False
        log.info("gradient checkpointing off: the diffusion U-Net keeps the activations of all blocks")


def padded(x: Tensor, grid: Sequence[int]) -> Tensor:
    """Return a volume with zeros at the far end of each axis that is shorter than that of the grid."""
    missing = [size - own for size, own in zip(grid, x.shape[2:], strict=True)]
    return F.pad(x, (0, missing[2], 0, missing[1], 0, missing[0])) if any(missing) else x


def _embedding(num_inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, width), nn.SiLU(), nn.Linear(width, width))


def _inputs(resampler: nn.Module, h: Tensor, embedding: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of a resampling block; residual ones (`resblock_updown`) take the timestep too."""
    return (h, embedding) if isinstance(resampler, TimeResidualBlock) else (h,)


def unet_arguments(
    settings: LdmSettings, latent_channels: int, mean_map_shape: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the arguments of `DiffusionModelUNet`.

    A class-conditional network has one class more than the data: the last one stands for a hidden label. Conditions
    that are concatenated to the noisy latent, and the mean map, are further input channels.
    """
    unet, conditioning = settings.unet, settings.conditioning
    num_mean_channels = 0 if mean_map_shape is None else mean_map_shape[0]
    return {
        "spatial_dims": 3,
        "in_channels": latent_channels + conditioning.num_concatenated(latent_channels) + num_mean_channels,
        "out_channels": latent_channels,
        "channels": unet.num_channels,
        "num_res_blocks": unet.res_blocks,
        "attention_levels": unet.attention_levels,
        "num_head_channels": unet.head_channels,
        "norm_num_groups": unet.num_groups,
        "resblock_updown": unet.resblock_updown,
        "num_class_embeds": conditioning.num_embedded_classes,
    }


def build_unet(
    settings: LdmSettings, latent_channels: int, mean_map_shape: Sequence[int] | None = None
) -> DiffusionUNet:
    """Build the U-Net that the settings describe, for latents of `latent_channels` channels.

    `mean_map_shape` is that of `Settings.mean_map_shape`; without it the network has no mean map.
    """
    conditioning = settings.conditioning
    num_numbers, scan_inputs = sum(conditioning.embedded_numbers.values()), conditioning.scan.inputs
    arguments = unet_arguments(settings, latent_channels, mean_map_shape)
    if conditioning.label_map.controlnet:
        from models.controlnet import ControlledUNet, ControlNet  # which are U-Nets, too

        controlnet = ControlNet(conditioning.label_map.controlnet, **arguments)
        model: DiffusionUNet = ControlledUNet(controlnet, num_numbers, scan_inputs, mean_map_shape, **arguments)
    else:
        model = DiffusionUNet(num_numbers, scan_inputs, mean_map_shape, **arguments)
    if settings.training.checkpoints_blocks:
        model.gradient_checkpointing_enable(offload=settings.training.use_gradient_checkpointing_offload)
    return model
