"""The stock MONAI networks that take our weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from models.autoencoder import build_autoencoder
from models.discriminator import build_discriminator
from models.unet import build_unet
from settings import Settings

CLASSES = {"autoencoder": "AutoencoderKL", "discriminator": "PatchDiscriminator", "ldm": "DiffusionModelUNet"}


def monai_arguments(network: str, settings: Settings) -> dict[str, Any]:
    """The arguments with which MONAI's class builds the network of the settings."""
    autoencoder, unet, conditioning = settings.autoencoder, settings.ldm.unet, settings.ldm.conditioning
    if network == "autoencoder":
        return {
            "spatial_dims": 3,
            "in_channels": autoencoder.in_channels,
            "out_channels": autoencoder.in_channels,
            "channels": autoencoder.num_channels,
            "num_res_blocks": autoencoder.res_blocks,
            "attention_levels": autoencoder.attention_levels,
            "latent_channels": autoencoder.latent_channels,
            "norm_num_groups": autoencoder.num_groups,
            "with_encoder_nonlocal_attn": autoencoder.has_middle_attention,
            "with_decoder_nonlocal_attn": autoencoder.has_middle_attention,
        }
    if network == "discriminator":
        return {
            "spatial_dims": 3,
            "in_channels": autoencoder.in_channels,
            "out_channels": 1,
            "channels": autoencoder.training.discriminator.num_channels,
            "num_layers_d": autoencoder.training.discriminator.num_layers_d,
            "norm": "INSTANCE",
        }
    assert network == "ldm", f"no network is called {network!r}"
    return {
        "spatial_dims": 3,
        "in_channels": autoencoder.latent_channels,
        "out_channels": autoencoder.latent_channels,
        "channels": unet.num_channels,
        "num_res_blocks": unet.res_blocks,
        "attention_levels": unet.attention_levels,
        "num_head_channels": unet.head_channels,
        "norm_num_groups": unet.num_groups,
        "resblock_updown": unet.resblock_updown,
        "num_class_embeds": conditioning.num_classes + 1 if conditioning.type == "class" else None,
    }


def stock_network(network: str, settings: Settings) -> nn.Module:
    """MONAI's own network for the settings."""
    import monai.networks.nets

    return getattr(monai.networks.nets, CLASSES[network])(**monai_arguments(network, settings))


def expected_state(network: str, settings: Settings) -> dict[str, torch.Tensor]:
    """Names and shapes (on the meta device) of our network's weights."""
    with torch.device("meta"):
        if network == "autoencoder":
            return build_autoencoder(settings.autoencoder).state_dict()
        if network == "discriminator":
            return build_discriminator(settings.autoencoder).state_dict()
        return build_unet(settings.ldm, settings.autoencoder.latent_channels).state_dict()
