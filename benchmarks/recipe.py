"""Recipes side by side on real volumes: every one trains for the same CPU seconds, with several seeds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.reference_loop import ReferenceLoop
from data import (
    Batch,
    BatchPlan,
    DataSplit,
    load_file,
    prepare_volumes,
    to_unit,
    training_batches,
    validation_batches,
)
from diffusion.frozen_autoencoder import freeze
from diffusion.latents import Latents, prepare_latents, stage_two_data
from diffusion.volume_codec import VolumeCodec
from evaluation.pair_metrics import psnr
from evaluation.samples import draw_samples
from evaluation.set_metrics import PrincipalComponents, squared_discrepancy
from evaluation.sharpness import compare_sharpness, sharpness_of
from models import StockAutoencoder
from runtime.processes import Process
from settings import DataError, Settings, load_settings
from training.autoencoder_step import AutoencoderStep
from training.ldm_step import LatentDiffusionStep
from training.step import TrainingStep

CPU = Process(torch.device("cpu"))
CONFIGURED, EPSILON, LOOP = "as configured", "epsilon", "3d_ldm-style loop"
LOOP_RATES = (1e-4, 1e-3)
LOOP_KL_WEIGHT = 1e-7
NUM_COMPONENTS = 32
DDIM_25 = f"{CONFIGURED}, ddim with 25 steps"

_ALONE = {"autoencoder.training.use_perceptual_loss": False, "autoencoder.training.adversarial_weight": 0.0}
STAGE_ONE: dict[str, dict[str, Any]] = {
    "l1 alone": {**_ALONE, "autoencoder.training.reconstruction_loss": "l1"},
    "l2 alone": {**_ALONE, "autoencoder.training.reconstruction_loss": "l2"},
    "without decay": {"autoencoder.training.learning_rate_decay": "none"},
}
STAGE_TWO: dict[str, dict[str, Any]] = {
    EPSILON: {"ldm.scheduler.prediction": "epsilon"},
    "without decay": {"ldm.training.learning_rate_decay": "none"},
    "without an average": {"ldm.training.ema_decay": 0.0},
}
# The tutorial's stage 2 predicts epsilon, has a constant learning rate, and neither clips nor averages. Its
# latents are normalised as ours are, by channel.
LOOP_STAGE_TWO = {
    "ldm.scheduler.type": "ddpm",
    "ldm.scheduler.prediction": "epsilon",
    "ldm.scheduler.time_shift": 1.0,
    "ldm.sampling.sampler": "ddim",
    "ldm.sampling.num_inference_steps": 25,
    "ldm.training.warmup_steps": 0,
    "ldm.training.learning_rate_decay": "none",
    "ldm.training.max_grad_norm": 0.0,
    "ldm.training.ema_decay": 0.0,
}


def compare_recipes(
    volumes: str,
    config: Path,
    overrides: Sequence[str],
    seconds: tuple[float, float],
    num_seeds: int,
    num_samples: int,
    ablations: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Train each recipe for the CPU `seconds` of its stage; return one row for each recipe and seed, and the anchors.

    Stage 2 trains on latents of the autoencoder that was trained as configured with the same seed; the loop's on those
    of its own best autoencoder. Without `ablations`, only the config as it is trains.
    """
    rows: list[dict[str, Any]] = []
    anchors: list[dict[str, Any]] = []
    # All seeds now: volumes that are too few, or a config that a recipe does not go with, are refused before training.
    for seed, (settings, split) in enumerate(
        [_prepared(volumes, config, overrides, seconds, seed, ablations) for seed in range(num_seeds)]
    ):
        stage_one, stage_two, loops = recipes_of(settings, ablations)
        judge = SampleJudge(split, settings, num_samples)
        anchors.append(judge.anchors())

        def add(stage: int, recipe: str, seed: int, row: dict[str, Any]) -> None:
            rows.append({"stage": stage, "recipe": recipe, "seed": seed, **row})
            progress(f"stage {stage}, {recipe}")

        networks = {}
        for name, changed in stage_one.items():
            step = AutoencoderStep(changed, CPU)
            num_steps = train(step, volume_batches(step.settings, split))
            networks[name] = step.autoencoder
            add(1, name, seed, {"steps": num_steps, **reconstructions(step.autoencoder, split, settings)})
        for ways in stage_two:
            for name, row in _samples(networks[CONFIGURED], ways, judge):
                add(2, name, seed, row)
        if ablations:
            best: tuple[float, StockAutoencoder] | None = None
            for rate in LOOP_RATES:
                loop = ReferenceLoop(settings, rate, LOOP_KL_WEIGHT)
                num_steps = _train_loop(loop, volume_batches(settings, split), seconds[0], settings)
                found = reconstructions(loop.autoencoder, split, settings)
                add(1, f"{LOOP}, {rate:g}", seed, {"steps": num_steps, **found})
                best = max(best or (0.0, loop.autoencoder), (found["psnr"], loop.autoencoder), key=lambda pair: pair[0])
            assert best is not None, "the loop has learning rates to try"
            for ways in loops:
                for name, row in _samples(best[1], ways, judge):
                    add(2, name, seed, row)
    return {
        "seconds": list(seconds),
        "num_samples": num_samples,
        "config": config.name,
        "overrides": list(overrides),
        "anchors": anchors,
        "rows": rows,
    }


def _prepared(
    volumes: str, config: Path, overrides: Sequence[str], seconds: tuple[float, float], seed: int, ablations: bool
) -> tuple[Settings, DataSplit]:
    """Return the settings and the volumes of one seed; raise `ConfigError` or `DataError` if a recipe cannot train."""
    fixed = [f"data.source={json.dumps(volumes)}", f"seed={seed}", "device.type=cpu", "device.mixed_precision=false"]
    fixed += ["data.num_workers=0", "data.persistent_workers=false", "ldm.latents.cache=memory"]
    stages = zip(("autoencoder", "ldm"), seconds, strict=True)
    times = [f"{stage}.training.max_hours={allowed / 3600!r}" for stage, allowed in stages]
    settings = load_settings(config, [*overrides, *fixed, *times], stage="ldm")
    recipes_of(settings, ablations)
    split = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
    if min(len(split.train), len(split.val)) < 2:
        found = f"{len(split.train)} for training and {len(split.val)} held out with seed {seed}"
        raise DataError(
            f"--volumes: {found}; allowed: 2 or more of each; give more volumes, or change data.val_fraction with --set"
        )
    return settings, split


Ways = dict[str, Settings]
"""Settings by name that train alike and sample each in its own way."""


def recipes_of(settings: Settings, ablations: bool) -> tuple[dict[str, Settings], list[Ways], list[Ways]]:
    """Return the settings of stage 1 by name, those of stage 2, and those of the loop's stage 2.

    Changes that a config already has, or that do nothing with its noise process, are left out.
    """
    ddim = {"ldm.sampling.sampler": "ddim", "ldm.sampling.num_inference_steps": 25}
    is_flow = settings.ldm.scheduler.type == "rflow"
    configured: Ways = {CONFIGURED: settings} | ({} if is_flow else {DDIM_25: settings.with_overrides(ddim)})
    if not ablations:
        return {CONFIGURED: settings}, [configured], []

    def changed(recipes: dict[str, dict[str, Any]]) -> dict[str, Settings]:
        found = {name: settings.with_overrides(changes) for name, changes in recipes.items()}
        return {name: other for name, other in found.items() if other != settings and not (is_flow and name == EPSILON)}

    rates = {f"{LOOP}, {rate:g}": {**LOOP_STAGE_TWO, "ldm.training.learning_rate": rate} for rate in LOOP_RATES}
    stage_one = {CONFIGURED: settings, **changed(STAGE_ONE)}
    stage_two, loops = ([{name: other} for name, other in changed(recipes).items()] for recipes in (STAGE_TWO, rates))
    return stage_one, [configured, *stage_two], loops


def volume_batches(settings: Settings, split: DataSplit) -> Iterator[list[Batch]]:
    """Return the micro-batches of each update of stage 1."""
    training = settings.autoencoder.training
    plan = BatchPlan.of(training, settings.seed, 0, 1)
    return training_batches(split.train, settings.data, plan, 0, training.last_step)


def train(step: TrainingStep, batches: Iterator[Sequence[Any]]) -> int:
    """Train to the end of the schedule in CPU time, put averaged weights in place, and return the number of steps."""
    step.schedule.start(clock=time.process_time)
    done = 0
    while not step.schedule.is_over(done):
        step(next(batches), done)
        done += 1
        step.schedule.read_clock(step.process)
    step.guard.raise_if_bad(0)
    if step.average is not None:
        step.network.load_state_dict(step.average.state_dict(), strict=False)
    return done


def _train_loop(loop: ReferenceLoop, batches: Iterator[list[Batch]], seconds: float, settings: Settings) -> int:
    start, done = time.process_time(), 0
    while time.process_time() - start < seconds:
        loop.step(next(batches)[0].image, done >= settings.autoencoder.training.adversarial_start_step)
        done += 1
    return done


@torch.no_grad()
def reconstructions(network: StockAutoencoder, split: DataSplit, settings: Settings) -> dict[str, float]:
    """Return mean PSNR and relative sharpness of the held-out volumes, decoded from the means of their latents."""
    network.eval()
    ratios, found, wanted = [], [], []
    for batch in validation_batches(split.val, stage_two_data(settings.data), 0, 1):
        image = batch.image
        decoded = network.decode(network.encode(image)[0]).clamp(-1, 1)
        ratios.append(float(psnr(decoded, image)))
        found.append(sharpness_of(to_unit(decoded[0])))
        wanted.append(sharpness_of(to_unit(image[0])))
    sharpness = compare_sharpness(found, wanted)["gradient_magnitude"]
    return {"psnr": sum(ratios) / len(ratios), "sharpness": sharpness}


class SampleJudge:
    """Compares samples with held-out volumes on the principal components of the training volumes.

    The discrepancy has one Gaussian kernel, as wide as the median distance between held-out volumes.
    """

    def __init__(self, split: DataSplit, settings: Settings, num_samples: int) -> None:
        data = stage_two_data(settings.data)
        train, held_out = (
            [to_unit(load_file(file, data).image) for file in files] for files in (split.train, split.val)
        )
        self.split, self.seed, self.num_samples = split, settings.seed, num_samples
        self.components = PrincipalComponents(train, NUM_COMPONENTS)
        self.held_out = torch.stack([self.components(volume) for volume in held_out])
        self.train = torch.stack([self.components(volume) for volume in train])
        self.held_out_sharpness = [sharpness_of(volume) for volume in held_out]
        self.shape = held_out[0].shape

    def anchors(self) -> dict[str, float]:
        """Return the discrepancy of as many training volumes, copies of their mean, and volumes of uniform noise."""
        generator = torch.Generator().manual_seed(self.seed)
        chosen = torch.randperm(len(self.train), generator=generator)[: self.num_samples]
        noise = [self.components(torch.rand(self.shape, generator=generator)) for _ in range(self.num_samples)]
        sets = {
            "training volumes": self.train[chosen],
            "mean training volume": self.train.mean(dim=0).expand(self.num_samples, -1),
            "noise": torch.stack(noise),
        }
        return {name: self._discrepancy(vectors) for name, vectors in sets.items()}

    def judge(self, samples: Sequence[Tensor]) -> dict[str, float]:
        """Return the squared discrepancy of samples and their relative sharpness."""
        sharpness = compare_sharpness([sharpness_of(sample) for sample in samples], self.held_out_sharpness)
        vectors = torch.stack([self.components(sample) for sample in samples])
        return {"mmd_squared": self._discrepancy(vectors), "sharpness": sharpness["gradient_magnitude"]}

    def _discrepancy(self, vectors: Tensor) -> float:
        return squared_discrepancy(vectors, self.held_out, widths=(1.0,))[0]


def train_on_latents(
    network: StockAutoencoder, settings: Settings, split: DataSplit
) -> tuple[LatentDiffusionStep, Latents, int]:
    """Train stage 2 on the latents of an autoencoder; return the step, the latents and the number of updates."""
    step = LatentDiffusionStep(settings, CPU, load_weights=False)
    codec = VolumeCodec(freeze(network), settings.autoencoder, step.precision)
    latents = prepare_latents(codec, split, settings, CPU)
    step = LatentDiffusionStep(settings, CPU, codec=codec, latents=latents)
    plan = BatchPlan.of(step.training, settings.seed, 0, 1)
    return step, latents, train(step, iter(latents.training_batches(plan, 0, step.training.last_step)))


def _samples(network: StockAutoencoder, ways: Ways, judge: SampleJudge) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train stage 2 once and yield how good the samples of each way are."""
    step, _, num_steps = train_on_latents(network, next(iter(ways.values())), judge.split)
    for name, chosen in ways.items():
        samples = draw_samples(step.unet, step.codec, chosen, step.normalisation, chosen.seed, judge.num_samples, 4)
        yield name, {"steps": num_steps, **judge.judge(samples)}
