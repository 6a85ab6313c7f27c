"""Opening a run: say what it will do, lock its folder, remove leftovers, and record its config and environment."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from data import DataSplit
from diffusion.conditioning import check_conditions
from models import build_autoencoder, build_discriminator, build_unet
from runtime.cli import check_output_folder
from runtime.files import (
    LATENTS,
    PREPARED,
    RUNS,
    RunFolder,
    check_regular,
    counted,
    printable,
    reason,
    used_caches,
    write_text,
)
from runtime.precision import cublas_config
from runtime.processes import Process, device_name
from settings import Settings, UserError, dump_yaml
from training.recording import duration_text

log = logging.getLogger(__name__)

_PACKAGES = ("torch", "monai", "numpy", "nibabel", "pydantic", "safetensors")


@contextmanager
def open_run(settings: Settings, process: Process) -> Iterator[RunFolder]:
    """Create the run folder and hold its lock, in the first process; yield its paths in every process."""
    folder = RunFolder(RUNS / settings.name)
    with ExitStack() as stack:
        with process.raise_on_all_ranks():
            if process.is_rank_zero:
                stack.enter_context(locked(folder))
                # Temporary files of a killed process; `Checkpoints.save` removes those of checkpoints.
                for path in (*folder.path.glob(".*.tmp"), *folder.previews.rglob(".*.png.*.tmp")):
                    path.unlink(missing_ok=True)
                try:
                    check_regular(folder.metrics)  # reading a device might never end
                except FileNotFoundError:
                    pass
                except OSError as error:
                    raise UserError(f"{folder.metrics}: cannot be used ({reason(error)}); move it away") from None
        yield folder


def check_run(settings: Settings, is_dry_run: bool) -> None:
    """Raise `UserError` before anything slow begins if the run cannot be written or another process holds its lock.

    That does not matter to a dry run. Only rank zero tries the lock: ranks that try it at the same time would meet
    each other.
    """
    folder = RunFolder(RUNS / settings.name)
    if is_dry_run or os.environ.get("RANK", "0") != "0":
        return
    check_output_folder(folder.path, "LEAN3D_RUNS")
    if (folder.path / ".lock").exists():
        with locked(folder):
            pass


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Create the run folder and hold its lock; raise `UserError` if another process holds it."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = (folder.path / ".lock").open("a+")
        check_regular(folder.path / ".lock")
    except OSError as error:
        raise UserError(
            f"{folder.path}: cannot be written ({reason(error)}); make it writable, or start in a folder where it is"
        ) from error
    try:
        # The system releases this lock however the process ends. With flock, the data loader's workers would inherit
        # it and keep it for a few seconds after the main process is killed.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise UserError(
            f"{folder.path}: in use by another process ({lock.read().strip() or 'unknown'}); "
            "wait for it, stop it, or choose another name"
        ) from None
    except OSError as error:
        log.warning("%s: this disk has no file locks (%s); do not start a run twice", folder.path, error.strerror)
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {platform.node()}")
    lock.flush()
    with lock:
        yield


def describe_run(folder: RunFolder, settings: Settings, process: Process, volumes: DataSplit | None = None) -> None:
    """Write the resolved config, the environment and the size of the data to the run folder, from the first process."""
    if not process.is_rank_zero:
        return
    write_text(folder.config, dump_yaml(settings))
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "device": device_name(process.device),
        "world_size": process.world_size,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cublas_workspace": cublas_config(),
    }
    if volumes is not None:
        counts = {"training": len(volumes.train), "held_out": len(volumes.val)}
        environment["data"] = {**counts, "classes": [printable(name) for name in volumes.class_names]}
    write_text(folder.environment, json.dumps(environment, indent=2) + "\n")
    caches = {
        f"{path.parent.name}/{path.name}"
        for path in used_caches
        if path.parent in (PREPARED, LATENTS) and path.is_dir()
    } | (folder.known_caches() or set())
    write_text(folder.caches, "".join(f"{name}\n" for name in sorted(caches)))


def summarise(settings: Settings, stage: str, num_volumes: int, world_size: int = 1) -> str:
    """Return grid, latent shape, parameter counts, effective batch and steps per pass, one per line."""
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
    volume, latent = ("x".join(map(str, axes)) for axes in (grid, settings.autoencoder.latent_grid(grid)))
    shapes = f"{settings.autoencoder.in_channels} x {volume} -> {settings.autoencoder.latent_channels} x {latent}"
    pretrained = settings.autoencoder.pretrained if is_first else settings.ldm.pretrained
    start = "random weights" if pretrained is None else printable(pretrained)
    lines = {
        "run": f"{RUNS / settings.name}, stage {stage}, {length}",
        "patch -> latent" if grid != settings.data.voxel_size else "grid -> latent": shapes,
        "parameters": ", ".join(f"{name} {count:,}" for name, count in parameters.items()),
        "effective batch": f"{training.batch_size} x {training.gradient_accumulation_steps} accumulated"
        f" x {counted(world_size, 'process')} = {samples}",
        "learning rate": f"{training.rate_from(pretrained):g}, from {start}",
        "steps per pass": f"{math.ceil(num_volumes / samples)} over {counted(num_volumes, 'training volume')}",
    }
    return "\n".join(f"{name + ':':<17}{text}" for name, text in lines.items())


def warn_of_stage_two(settings: Settings, volumes: DataSplit, process: Process) -> None:
    """Warn in stage 1 if stage 2 would refuse the config, because afterwards the grid can no longer change."""
    if not process.is_rank_zero:
        return
    try:
        check_conditions(settings, volumes)
    except UserError as error:
        log.warning("stage 2 will refuse this config: %s", error)
