"""Trains a small network for each task and measures its samples against held-out volumes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from dev.conditions.surfaces import write_surfaces

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
AUTOENCODER = "condition_autoencoder"
AUTOENCODER_STEPS = 1000
NUM_HELD_OUT = 20
SETTING = "ldm.conditioning"
FROM_TARGET = {f"{SETTING}.volume.source": "target", f"{SETTING}.volume.encoding": "autoencoder"}


@dataclass(frozen=True)
class Way:
    """One way to draw samples: steps and guidance, and by how many of the task's networks at most."""

    steps: int
    guidance: float
    most_networks: int = 3


@dataclass(frozen=True)
class Task:
    """What stage 2 is trained with, for how many updates, with which seeds, and how its samples are drawn."""

    title: str
    short: str
    values: dict[str, Any]
    max_steps: int
    ways: tuple[Way, ...]
    seeds: tuple[int, ...] = (42,)

    def run(self, name: str, seed: int) -> str:
        """Return the name of the run with one of the seeds."""
        return f"condition_{name}_{seed}"


def tasks(volumes: Path) -> dict[str, Task]:
    """Return the tasks by name, on volumes with a subfolder `labels`."""
    maps = {f"{SETTING}.labels.source": volumes / "labels", f"{SETTING}.labels.num_classes": 3}
    hole = {**FROM_TARGET, f"{SETTING}.volume.degrade.hole": "[16,16,16]"}
    finer = {**FROM_TARGET, f"{SETTING}.volume.degrade.downsample": "[1,2,1]"}
    guided, plain = (Way(1, 1.0), Way(1, 2.0), Way(12, 1.0, 1)), (Way(1, 1.0), Way(12, 1.0))
    return {
        "labels": Task("Label map to image", "label map", maps, 300, guided, (42, 43, 44)),
        "hole": Task("Inpainting a hole of 16 x 16 x 16 voxels", "hole", hole, 600, plain),
        "finer": Task("Super-resolution by 2 along one axis", "low resolution", finer, 300, plain),
    }


def stage_one(volumes: Path) -> float:
    """Train the autoencoder of all tasks unless it is trained; return CPU seconds."""
    return _train("train_autoencoder.py", AUTOENCODER, _data(volumes))


def stage_two(name: str, task: Task, seed: int, volumes: Path) -> float:
    """Train the network of a task with one seed unless it is trained; return CPU seconds."""
    values = {
        **_data(volumes),
        "seed": seed,
        "ldm.autoencoder": f"runs/{AUTOENCODER}/autoencoder.safetensors",
        "ldm.training.max_steps": task.max_steps,
        "ldm.training.validate_every": task.max_steps,
        "ldm.training.save_every": 400,
        "ldm.sampling.num_previews": 0,
        **task.values,
    }
    return _train("train_ldm.py", task.run(name, seed), values)


def _data(volumes: Path) -> dict[str, Any]:
    training = "autoencoder.training"
    steps = {f"{training}.max_steps": AUTOENCODER_STEPS, f"{training}.validate_every": AUTOENCODER_STEPS}
    return {**_source(volumes), **steps}


@cache
def _source(volumes: Path) -> dict[str, Any]:
    """List the volumes with the split of the preset's seed, which then holds for all seeds; return the settings."""
    from data import prepare_volumes
    from settings import load_settings

    grid = "[32,48,32]"
    settings = load_settings(CONFIG, [f"data.source={volumes}", f"data.voxel_size={grid}"], "autoencoder")
    found = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
    listing = Path("runs") / "condition_volumes" / "dataset.json"
    listing.parent.mkdir(parents=True, exist_ok=True)
    sides = {"training": found.train, "validation": found.val}
    text = json.dumps({side: [{"image": str(file.path)} for file in files] for side, files in sides.items()}, indent=1)
    listing.write_text(text, encoding="utf-8")
    return {"data.source": listing, "data.allow_outside_root": "true", "data.voxel_size": grid}


def _train(script: str, name: str, values: dict[str, Any]) -> float:
    weights = Path("runs") / name / f"{'ldm' if 'ldm' in script else 'autoencoder'}.safetensors"
    if weights.is_file():
        return 0.0
    overrides = [f"{key}={value}" for key, value in {"name": name, **values}.items()]
    command = [sys.executable, str(ROOT / script), "--quiet", "--config", str(CONFIG), *overrides]
    start = _seconds_of_children()
    print(f"runs/{name}: training", flush=True)
    subprocess.run(command, check=True)
    seconds = _seconds_of_children() - start
    print(f"runs/{name}: trained in {seconds:.0f} CPU seconds", flush=True)
    return seconds


def _seconds_of_children() -> float:
    times = os.times()
    return times.children_user + times.children_system


@dataclass(frozen=True)
class Result:
    """The errors of one way to draw samples, for each network, by the condition that was told."""

    way: Way
    of_networks: tuple[dict[str, dict[str, float]], ...]
    num: int

    def error(self, told: str, what: str = "l1") -> float:
        """Return the mean error over the networks."""
        return statistics.fmean(errors[told][what] for errors in self.of_networks)

    def lower_than(self, told: str) -> float:
        """Return by which share the mean L1 with the right condition is lower than with another."""
        return 1 - self.error("right") / self.error(told)

    def each_lower_than(self, told: str) -> list[float]:
        """Return the same for each network."""
        return [1 - errors["right"]["l1"] / errors[told]["l1"] for errors in self.of_networks]

    @property
    def told(self) -> tuple[str, ...]:
        """Return what was compared."""
        return tuple(self.of_networks[0])


def measure(name: str, task: Task) -> Iterator[Result]:
    """Yield the result of each way to draw samples, by the trained networks of a task."""
    from diffusion.latents import stage_two_data
    from evaluation.conditional.effect import condition_effect

    for way in task.ways:
        changes = {"num_inference_steps": way.steps, "guidance_scale": way.guidance}
        found, num = [], 0
        for seed in task.seeds[: way.most_networks]:
            network, codec, trained, frame, volumes, pairs, conditions = _opened(task.run(name, seed))
            settings = trained.with_overrides({f"ldm.sampling.{key}": value for key, value in changes.items()})
            files = volumes.val[:NUM_HELD_OUT]
            data = stage_two_data(settings.data)
            effect = condition_effect(
                network, codec, settings, frame.normalisation, conditions, pairs, files, data, seed, 4
            )
            means = {key: value for key, value in effect.items() if isinstance(value, dict)}
            found.append({key: {what: value[what] for what in ("l1", "psnr")} for key, value in means.items()})
            num = len(files)
            print(f"{name}, seed {seed}, {way.steps} steps, guidance {way.guidance:g}: measured", flush=True)
        yield Result(way, tuple(found), num)


@dataclass(frozen=True)
class Case:
    """A held-out volume, its condition and a sample, (D, H, W) in [0, 1], and where the condition is unknown."""

    condition: Any
    sample: Any
    target: Any
    unknown: Any


def draw(name: str, task: Task, number: int) -> Iterator[Case]:
    """Yield samples for held-out volumes, drawn in the task's first way, with what their conditions know."""
    from data import load_file, to_unit
    from diffusion.latents import stage_two_data
    from diffusion.sampling import draw_volumes
    from evaluation.conditional.known import with_known

    network, codec, trained, frame, volumes, _, conditions = _opened(task.run(name, task.seeds[0]))
    way, files = task.ways[0], volumes.val[:number]
    changes = {"num_inference_steps": way.steps, "guidance_scale": way.guidance}
    settings = trained.with_overrides({f"ldm.sampling.{key}": value for key, value in changes.items()})
    condition_of = partial(conditions.of_held_out, files, settings.ldm.conditioning)
    drawn = draw_volumes(network, codec, settings, frame.normalisation, 0, range(number), condition_of)
    for file, volume in zip(files, drawn, strict=True):
        target, unknown = load_file(file, stage_two_data(settings.data)).image, None
        if conditions.image is not None:
            _, unknown = conditions.image(conditions.numbers[file.name], 0)
        sample = with_known(volume.cpu(), target, settings.ldm.conditioning.volume, unknown)
        ((_, told),) = conditions.shown(file.name)
        yield Case(told, to_unit(sample[0]), to_unit(target[0]), unknown)


@cache
def _opened(name: str) -> tuple[Any, ...]:
    from data import prepare_volumes
    from diffusion.conditioning import check_conditions
    from diffusion.conditioning.conditions import prepare_conditions
    from evaluation.trained_run import TrainedRun
    from runtime.processes import Process

    run = TrainedRun(Path("runs") / name)
    network, frame = run.unet()
    codec, settings = run.codec(), run.settings
    volumes = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
    pairs = check_conditions(settings, volumes)
    process = Process(codec.precision.device)
    conditions = prepare_conditions(settings, pairs, volumes, process, codec, frame.joined_scale)
    assert conditions is not None, "every task has a condition"
    return network, codec, settings, frame, volumes, pairs, conditions


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
