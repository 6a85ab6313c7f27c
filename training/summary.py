"""What a run logs before it starts: a summary, and a warning if stage 2 would refuse the config."""

from __future__ import annotations

import logging
import math

import torch

from data import DataSplit
from diffusion.conditioning import check_conditions
from models import build_autoencoder, build_discriminator, build_unet
from runtime.files.names import counted
from runtime.files.run_folder import RUNS
from runtime.processes import Process
from settings import Settings, UserError
from settings.ldm import SchedulerSettings
from training.recording.progress import duration_text

log = logging.getLogger(__name__)


def summarise(settings: Settings, stage: str, num_volumes: int, world_size: int = 1) -> str:
    """Return grid, latent shape, parameter counts, noise process, effective batch and steps per pass, one per line."""
    is_first = stage == "autoencoder"
    with torch.device("meta"):
        networks = {"autoencoder": build_autoencoder(settings.autoencoder)}
        if not is_first:
            networks["unet"] = build_unet(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape)
        elif settings.autoencoder.training.uses_discriminator:
            networks["discriminator"] = build_discriminator(settings.autoencoder)
    parameters = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    training = settings.training_of(stage)
    hours = training.max_hours
    length = counted(training.max_steps, "step") if hours is None else duration_text(3600 * hours)
    samples = training.samples_per_rank * world_size
    grid = settings.training_grid if is_first else settings.data.voxel_size
    latent = settings.autoencoder.latent_grid(grid)
    channels = settings.autoencoder.latent_channels
    shapes = "patch -> latent" if grid != settings.data.voxel_size else "grid -> latent"
    lines = {
        "run": f"{RUNS / settings.name}, stage {stage}, {length}",
        shapes: f"{settings.autoencoder.in_channels} x {_axes(grid)} -> {channels} x {_axes(latent)}",
        "parameters": ", ".join(f"{name} {count:,}" for name, count in parameters.items()),
        "effective batch": f"{training.batch_size} x {training.gradient_accumulation_steps} accumulated"
        f" x {counted(world_size, 'process')} = {samples}",
        "steps per pass": f"{math.ceil(num_volumes / samples)} over {counted(num_volumes, 'training volume')}",
    }
    if not is_first:
        lines["noise process"] = _noise_process(settings.ldm.scheduler)
    return "\n".join(f"{name + ':':<17}{text}" for name, text in lines.items())


def warn_of_stage_two(settings: Settings, volumes: DataSplit, process: Process) -> None:
    """Warn in stage 1 if stage 2 would refuse the config, because afterwards the grid can no longer change."""
    if not process.is_rank_zero:
        return
    try:
        check_conditions(settings, volumes)
    except UserError as error:
        log.warning("stage 2 will refuse this config: %s", error)


def _noise_process(scheduler: SchedulerSettings) -> str:
    """Return what the U-Net predicts, and which keys have no effect on that."""
    if scheduler.type == "rflow":
        return "rflow, predicts the flow; prediction and schedule are for ddpm and have no effect"
    return f"ddpm, {scheduler.num_train_timesteps} timesteps, predicts {scheduler.prediction}"


def _axes(grid: tuple[int, ...]) -> str:
    return "x".join(str(axis) for axis in grid)
