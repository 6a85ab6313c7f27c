"""Loads the autoencoder that encodes condition volumes, if they have one of their own."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from diffusion.frozen_autoencoder import freeze
from diffusion.volume_codec import VolumeCodec
from models import build_autoencoder
from models.weight_files import load_state, load_weights
from runtime.placement import move
from runtime.precision import Precision
from settings import CheckpointError, ConfigError, Settings, validate
from settings.autoencoder import AutoencoderSettings


def other_codec(
    path: Path, in_channels: int, latent_channels: int, settings: Settings, precision: Precision
) -> VolumeCodec:
    """Return the frozen autoencoder of `path`, built from the settings that are stored with its weights.

    Raises `CheckpointError` unless it takes `in_channels`, gives `latent_channels`, and downsamples like the other.
    """
    own, state = load_other(path, in_channels, latent_channels, settings)
    autoencoder = build_autoencoder(own)
    load_state(autoencoder, state, path)
    move(freeze(autoencoder), precision.device, settings.device.memory_format)
    return VolumeCodec(autoencoder, own, precision)


def load_other(
    path: Path, in_channels: int, latent_channels: int, settings: Settings
) -> tuple[AutoencoderSettings, dict[str, Tensor]]:
    """Return the settings and the weights of the autoencoder of `path`; raise `CheckpointError` as `other_codec`."""
    key = "ldm.conditioning.volume"
    if not path.is_file():
        raise CheckpointError(f"{key}.autoencoder: {path} does not exist; give the autoencoder.safetensors of a run")
    state, metadata = load_weights(path)
    if metadata.get("stage") != "autoencoder" or not isinstance(metadata.get("settings"), dict):
        raise CheckpointError(f"{path}: not written by train_autoencoder.py; give the autoencoder.safetensors of a run")
    try:
        own = validate(metadata["settings"]).autoencoder
    except ConfigError as error:
        raise CheckpointError(f"{path}: its settings do not belong to this version of the program: {error}") from None
    checks = (
        ("num_channels", in_channels, own.in_channels, "it takes"),
        ("latent_channels", latent_channels, own.latent_channels, "its latents have"),
    )
    for name, asked, found, words in checks:
        if asked != found:
            raise CheckpointError(
                f"{path}: {words} {found} channels, and {key}.{name} means {asked}; set {key}.{name}={found}"
            )
    downsampling = settings.autoencoder.downsampling
    if own.downsampling != downsampling:
        raise CheckpointError(
            f"{path}: it divides the grid by {list(own.downsampling)}, and the autoencoder that is trained on by "
            f"{list(downsampling)}; both must be the same; give another"
        )
    return own, state
