"""The stock MONAI networks that take our weights, and the parameters that our networks expect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.arguments import autoencoder_arguments, discriminator_arguments, unet_arguments
from models.autoencoder import build_autoencoder
from models.discriminator import build_discriminator
from models.unet import SCAN_LAYERS, build_unet
from settings import CheckpointError, Settings

CLASSES = {"autoencoder": "AutoencoderKL", "discriminator": "PatchDiscriminator", "ldm": "DiffusionModelUNet"}


def monai_arguments(network: str, settings: Settings) -> dict[str, Any]:
    """Return the arguments with which MONAI's class builds the network; raise `CheckpointError` if it cannot."""
    if network == "autoencoder":
        if not settings.autoencoder.has_stock_strides:
            raise CheckpointError(
                f"autoencoder.strides: {[list(strides) for strides in settings.autoencoder.level_strides]}; MONAI's "
                "AutoencoderKL has strides of 2 only, so it would compute something else with these weights; only "
                "networks trained with strides: 2 can be exported"
            )
        if settings.autoencoder.bottleneck != "kl":
            raise CheckpointError(
                f"autoencoder.bottleneck: {settings.autoencoder.bottleneck}; MONAI's AutoencoderKL cannot quantise its "
                "latent; only networks trained with bottleneck: kl can be exported"
            )
        arguments = autoencoder_arguments(settings.autoencoder)
        if not is_maisi(network, settings):
            return arguments
        # Splits of volumes, which save memory, must fit the grid; one always does.
        return {"num_channels": arguments.pop("channels"), **arguments, "include_fc": True, "num_splits": 1}
    if network == "discriminator":
        return discriminator_arguments(settings.autoencoder)
    assert network == "ldm", f"no network is called {network!r}"
    if settings.ldm.conditioning.embedded_numbers:
        raise CheckpointError(
            f"ldm.conditioning: {', '.join(settings.ldm.conditioning.embedded_numbers)}; MONAI's DiffusionModelUNet "
            "takes no numbers; only networks trained without them can be exported"
        )
    arguments = unet_arguments(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape)
    inputs = settings.ldm.conditioning.scan.inputs
    if not inputs:
        return arguments
    flags = {f"include_{SCAN_LAYERS[name].removesuffix('_layer')}_input": True for name in inputs}
    return {"num_channels": arguments.pop("channels"), **arguments, "include_fc": True, **flags}


def is_maisi(network: str, settings: Settings) -> bool:
    """Return whether MONAI's class is MAISI's: a U-Net that takes inputs of scans, an autoencoder that interpolates."""
    if network == "autoencoder":
        return settings.autoencoder.upsampling == "trilinear"
    return network == "ldm" and bool(settings.ldm.conditioning.scan.inputs)


def monai_class(network: str, settings: Settings) -> type[nn.Module]:
    """Return MONAI's class of a network."""
    if is_maisi(network, settings):
        from monai.apps.generation.maisi.networks.autoencoderkl_maisi import AutoencoderKlMaisi
        from monai.apps.generation.maisi.networks.diffusion_model_unet_maisi import DiffusionModelUNetMaisi

        return AutoencoderKlMaisi if network == "autoencoder" else DiffusionModelUNetMaisi
    import monai.networks.nets

    return getattr(monai.networks.nets, CLASSES[network])


def stock_network(network: str, settings: Settings) -> nn.Module:
    """Build MONAI's own network."""
    return monai_class(network, settings)(**monai_arguments(network, settings))


def expected_state(network: str, settings: Settings) -> dict[str, Tensor]:
    """Return the state dict of our network on the meta device: names and shapes without values."""
    with torch.device("meta"):
        if network == "autoencoder":
            return build_autoencoder(settings.autoencoder).state_dict()
        if network == "discriminator":
            return build_discriminator(settings.autoencoder).state_dict()
        return build_unet(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape).state_dict()
