"""Trains a small network for each task and measures its samples against held-out volumes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dev.conditions.surfaces import write_surfaces

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
AUTOENCODER = "condition_autoencoder"
SETTING = "ldm.conditioning"
FROM_TARGET = {f"{SETTING}.volume.source": "target", f"{SETTING}.volume.encoding": "autoencoder"}


@dataclass(frozen=True)
class Way:
    """One way to draw samples: steps, guidance, for how many held-out volumes, and with how many seeds."""

    steps: int
    guidance: float
    num: int = 20
    seeds: int = 1


@dataclass(frozen=True)
class Task:
    """What stage 2 is trained with, for how many updates, and how its samples are drawn."""

    title: str
    values: dict[str, Any]
    max_steps: int
    ways: tuple[Way, ...]


def tasks(volumes: Path) -> dict[str, Task]:
    """Return the tasks by name, on volumes with a subfolder `labels`."""
    maps = {f"{SETTING}.labels.source": volumes / "labels", f"{SETTING}.labels.num_classes": 3}
    hole = {**FROM_TARGET, f"{SETTING}.volume.degrade.hole": "[16,16,16]"}
    finer = {**FROM_TARGET, f"{SETTING}.volume.degrade.downsample": "[1,2,1]"}
    once = (Way(1, 1.0), Way(12, 1.0))
    return {
        "labels": Task("Label map to image", maps, 300, (Way(1, 1.0), Way(1, 2.0, seeds=3))),
        "hole": Task("Inpainting a hole of 16 x 16 x 16 voxels", hole, 200, once),
        "finer": Task("Super-resolution by 2 along one axis", finer, 120, once),
    }


def stage_one(volumes: Path) -> float:
    """Train the autoencoder of all tasks unless it is trained; return CPU seconds."""
    return _train("train_autoencoder.py", AUTOENCODER, _data(volumes))


def stage_two(name: str, task: Task, volumes: Path) -> float:
    """Train the network of a task unless it is trained; return CPU seconds."""
    values = {
        **_data(volumes),
        "ldm.autoencoder": f"runs/{AUTOENCODER}/autoencoder.safetensors",
        "ldm.training.max_steps": task.max_steps,
        "ldm.training.validate_every": 1000,
        "ldm.training.save_every": 400,
        "ldm.sampling.num_previews": 0,
        **task.values,
    }
    return _train("train_ldm.py", f"condition_{name}", values)


def _data(volumes: Path) -> dict[str, Any]:
    steps = {"autoencoder.training.max_steps": 400, "autoencoder.training.validate_every": 400}
    return {"data.source": volumes, "data.voxel_size": "[32,48,32]", **steps}


def _train(script: str, name: str, values: dict[str, Any]) -> float:
    weights = Path("runs") / name / f"{'ldm' if 'ldm' in script else 'autoencoder'}.safetensors"
    if weights.is_file():
        return 0.0
    overrides = [f"{key}={value}" for key, value in {"name": name, **values}.items()]
    command = [sys.executable, str(ROOT / script), "--quiet", "--config", str(CONFIG), *overrides]
    start = _seconds_of_children()
    subprocess.run(command, check=True)
    return _seconds_of_children() - start


def _seconds_of_children() -> float:
    import os

    times = os.times()
    return times.children_user + times.children_system


@dataclass(frozen=True)
class Result:
    """The mean errors of one way to draw samples, over the seeds, by the condition that was told."""

    way: Way
    errors: dict[str, dict[str, float]]
    cpu_seconds: float

    def lower_than(self, told: str) -> float:
        """Return by which share L1 with the right condition is lower than with another."""
        return 1 - self.errors["right"]["l1"] / self.errors[told]["l1"]


def measure(name: str, ways: Sequence[Way]) -> Iterator[Result]:
    """Yield the result of each way to draw samples of a trained run."""
    from diffusion.latents import stage_two_data
    from evaluation.conditional.effect import condition_effect

    network, codec, trained, frame, volumes, pairs, conditions = _opened(name)
    for way in ways:
        changes = {"num_inference_steps": way.steps, "guidance_scale": way.guidance}
        settings = trained.with_overrides({f"ldm.sampling.{key}": value for key, value in changes.items()})
        start = time.process_time()
        found = [
            condition_effect(
                network,
                codec,
                settings,
                frame.normalisation,
                conditions,
                pairs,
                volumes.val[: way.num],
                stage_two_data(settings.data),
                seed,
                4,
            )
            for seed in range(way.seeds)
        ]
        told = [key for key, value in found[0].items() if isinstance(value, dict)]
        means = {key: {what: statistics.fmean(f[key][what] for f in found) for what in ("l1", "psnr")} for key in told}
        yield Result(way, means, time.process_time() - start)


@cache
def _opened(name: str) -> tuple[Any, ...]:
    from data import prepare_volumes
    from diffusion.conditioning import check_conditions
    from diffusion.conditioning.conditions import prepare_conditions
    from evaluation.trained_run import TrainedRun
    from runtime.processes import Process

    run = TrainedRun(Path("runs") / f"condition_{name}")
    network, frame = run.unet()
    codec, settings = run.codec(), run.settings
    volumes = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
    pairs = check_conditions(settings, volumes)
    conditions = prepare_conditions(settings, pairs, volumes, Process(codec.precision.device), codec)
    assert conditions is not None, "every task has a condition"
    return network, codec, settings, frame, volumes, pairs, replace(conditions, scale=frame.joined_scale)


def occupancy(weight: float, max_steps: int) -> float:
    """Train an autoencoder on sparse grids with an `occupied_weight`; return the mean IoU of held-out grids."""
    import torch

    from data import load_file, prepare_volumes
    from evaluation.pair_metrics import iou
    from evaluation.trained_run import TrainedRun

    grids = Path("runs") / "surfaces"
    if not grids.is_dir():
        write_surfaces(grids, 48)
    name = f"surfaces_weight_{weight:g}"
    stage, training = "autoencoder", "autoencoder.training"
    values = {
        "data.source": grids,
        "data.patch_size": "[16,16,16]",
        "data.intensity": "{mode: window, lower: 0, upper: 1}",
        f"{stage}.num_channels": "[16,32,32]",
        f"{stage}.num_res_blocks": "[0,1,1]",
        f"{stage}.attention_levels": "[false,false,false]",
        f"{training}.occupied_weight": weight,
        f"{training}.occupied_threshold": 0.5,
        f"{training}.max_steps": max_steps,
        f"{training}.validate_every": max_steps,
    }
    _train("train_autoencoder.py", name, values)
    run = TrainedRun(Path("runs") / name)
    codec, data = run.codec(), run.settings.data.model_copy(update={"patch_size": None})
    found = []
    for file in prepare_volumes(data, run.settings.seed, 1).val:
        image = load_file(file, data).image
        with torch.no_grad():
            reconstruction = codec.decode(codec.encode(image)[0])
        found.append(
            float(iou(reconstruction[None], image[None], run.settings.autoencoder.training.occupied_threshold))
        )
    return statistics.fmean(found)
