"""The arguments with which MONAI's classes build the networks of a config, for our builders and for export to MONAI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from settings import AutoencoderSettings, LdmSettings


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


def discriminator_arguments(settings: AutoencoderSettings) -> dict[str, Any]:
    """Return the arguments of `PatchDiscriminator`.

    It has instance norm, because MONAI's default, batch norm, makes accumulated micro-batches differ from one large
    batch.
    """
    return {
        "spatial_dims": 3,
        "in_channels": settings.in_channels,
        "out_channels": 1,
        "channels": settings.training.discriminator.num_channels,
        "num_layers_d": settings.training.discriminator.num_layers_d,
        "norm": "INSTANCE",
    }


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
