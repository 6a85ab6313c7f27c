"""Counts the parameters of a config's networks."""

from __future__ import annotations

import torch

from models import build_autoencoder, build_unet
from settings import Settings


def count_parameters(settings: Settings) -> tuple[int, int]:
    """Return the parameters of the autoencoder and of the U-Net; builds both without memory."""
    with torch.device("meta"):
        networks = (
            build_autoencoder(settings.autoencoder),
            build_unet(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape),
        )
    first, second = (sum(parameter.numel() for parameter in network.parameters()) for network in networks)
    return first, second
