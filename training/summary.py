"""What a run logs before it starts: a summary, and a warning if stage 2 would refuse the config."""

from __future__ import annotations

import logging
import math

import torch

from data import DataSplit
from diffusion.conditioning import check_conditions
from models import build_autoencoder, build_discriminator, build_unet
from runtime.processes import Process
from settings import Settings, TrainingSettings, UserError
from settings.rules import find_problems
from storage.names import counted

log = logging.getLogger(__name__)


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
    if stage == "autoencoder":
        latent = list(settings.autoencoder.latent_grid(grid))
    lines = {
        "run": f"runs/{settings.name}, stage {stage}, {_length(training)}",
        "grid -> latent": f"{settings.autoencoder.in_channels} x {_axes(grid)} -> {channels} x {_axes(latent)}",
        "parameters": ", ".join(f"{name} {_count(network):,}" for name, network in networks.items()),
        "effective batch": f"{training.batch_size} x {training.gradient_accumulation_steps} accumulated"
        f" x {counted(world_size, 'process')} = {samples}",
        "steps per pass": f"{math.ceil(num_volumes / samples)} over {num_volumes} training volumes",
    }
    return "\n".join(f"{name + ':':<17}{text}" for name, text in lines.items())


def warn_of_stage_two(settings: Settings, volumes: DataSplit, process: Process) -> None:
    """Warn in stage 1 if stage 2 would refuse the config, because afterwards the grid can no longer change."""
    if not process.is_first:
        return
    problems = [str(problem) for problem, _ in find_problems(settings, "ldm")]
    try:
        check_conditions(settings, volumes)
    except UserError as error:
        problems.append(str(error))
    for problem in problems:
        log.warning("stage 2 will refuse this config: %s", problem)


def _length(training: TrainingSettings) -> str:
    return counted(training.max_steps, "step") if training.max_hours is None else f"{training.max_hours:g} hours"


def _axes(grid: tuple[int, ...] | list[int]) -> str:
    return "x".join(str(axis) for axis in grid)


def _count(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
