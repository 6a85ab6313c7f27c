"""The summary that a run logs before it starts."""

from __future__ import annotations

import math

import torch

from models import build_autoencoder, build_discriminator, build_unet
from settings import Settings, TrainingSettings
from storage.names import counted


def summarise(settings: Settings, stage: str, num_volumes: int, world_size: int = 1) -> str:
    """Return grid, latent shape, parameter counts, effective batch and steps per pass, one per line."""
    with torch.device("meta"):
        networks = {"autoencoder": build_autoencoder(settings.autoencoder)}
        if stage == "autoencoder" and settings.autoencoder.training.uses_discriminator:
            networks["discriminator"] = build_discriminator(settings.autoencoder)
        if stage == "ldm":
            networks["unet"] = build_unet(settings.ldm, settings.autoencoder.latent_channels)
    training: TrainingSettings = settings.autoencoder.training if stage == "autoencoder" else settings.ldm.training
    samples = training.samples_per_rank * world_size
    channels, *latent = settings.latent_shape
    grid = settings.training_grid if stage == "autoencoder" else settings.data.voxel_size
    factor = settings.autoencoder.downsampling
    if stage == "autoencoder":
        latent = [axis // factor for axis in grid]
    lines = {
        "run": f"runs/{settings.name}, stage {stage}, {_length(training)}",
        "grid -> latent": f"{settings.autoencoder.in_channels} x {_axes(grid)} -> {channels} x {_axes(latent)}",
        "parameters": ", ".join(f"{name} {_count(network):,}" for name, network in networks.items()),
        "effective batch": f"{training.batch_size} x {training.gradient_accumulation_steps} accumulated"
        f" x {world_size} process{'es' if world_size > 1 else ''} = {samples}",
        "steps per pass": f"{math.ceil(num_volumes / samples)} over {num_volumes} training volumes",
    }
    return "\n".join(f"{name + ':':<17}{text}" for name, text in lines.items())


def _length(training: TrainingSettings) -> str:
    return counted(training.max_steps, "step") if training.max_hours is None else f"{training.max_hours:g} hours"


def _axes(grid: tuple[int, ...] | list[int]) -> str:
    return "x".join(str(axis) for axis in grid)


def _count(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
