"""Recipes side by side on real volumes: every one trains for the same CPU seconds, with several seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.reference_loop import ReferenceLoop
from data import Batch, BatchPlan, DataSplit, prepare_volumes, to_unit, training_batches, validation_batches
from diffusion.frozen_autoencoder import freeze
from diffusion.latents import prepare_latents, stage_two_data
from diffusion.volume_codec import VolumeCodec
from evaluation.pair_metrics import psnr
from evaluation.samples import draw_samples, load_reference
from evaluation.set_metrics import squared_discrepancy, summary_vector
from evaluation.sharpness import compare_sharpness, sharpness_of
from models import StockAutoencoder
from runtime.processes import Process
from settings import DataError, Settings, load_settings
from training.autoencoder_step import AutoencoderStep
from training.ldm_step import LatentDiffusionStep
from training.step import TrainingStep

CPU = Process(torch.device("cpu"))
CONFIGURED, LOOP = "as configured", "3d_ldm-style loop"
LOOP_RATES = (1e-4, 1e-3)
LOOP_KL_WEIGHT = 1e-7

_ALONE = {"autoencoder.training.use_perceptual_loss": False, "autoencoder.training.adversarial_weight": 0.0}
STAGE_ONE: dict[str, dict[str, Any]] = {
    CONFIGURED: {},
    "l1 alone": {**_ALONE, "autoencoder.training.reconstruction_loss": "l1"},
    "l2 alone": {**_ALONE, "autoencoder.training.reconstruction_loss": "l2"},
    "without decay": {"autoencoder.training.learning_rate_decay": "none"},
}
STAGE_TWO: dict[str, dict[str, Any]] = {
    CONFIGURED: {},
    "epsilon": {"ldm.scheduler.prediction": "epsilon", "ldm.scheduler.zero_terminal_snr": False},
    "without decay": {"ldm.training.learning_rate_decay": "none"},
    "without an average": {"ldm.training.ema_length": None, "ldm.training.ema_decay": 0.0},
    "min-SNR": {"ldm.training.loss_weighting": "min_snr", "ldm.scheduler.zero_terminal_snr": False},
}


def compare_recipes(
    volumes: str, config: Path, seconds: float, num_seeds: int, num_samples: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Train each recipe for `seconds` of CPU time a stage; return one row for each recipe and seed.

    Stage 2 trains on latents of the autoencoder that was trained as configured with the same seed.
    """
    rows: list[dict[str, Any]] = []
    for seed in range(num_seeds):
        fixed = [f"data.source={volumes}", f"seed={seed}", "device.type=cpu", "device.mixed_precision=false"]
        fixed += ["data.num_workers=0", "data.persistent_workers=false", "ldm.latents.cache=memory"]
        times = [f"{stage}.training.max_hours={seconds / 3600!r}" for stage in ("autoencoder", "ldm")]
        settings = load_settings(config, [*fixed, *times], stage="ldm")
        split = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
        if len(split.val) < 2:
            raise DataError(f"--volumes: {len(split.val)} held-out volumes; the comparison needs 2 or more; give more")
        trained = {}
        for name, changes in STAGE_ONE.items():
            step = AutoencoderStep(settings.with_overrides(changes), CPU)
            num_steps = _train(step, _volumes(step.settings, split))
            trained[name] = step.autoencoder
            rows.append({"stage": 1, "recipe": name, "seed": seed, "steps": num_steps})
            rows[-1] |= _reconstructions(step.autoencoder, split, settings)
            progress(f"stage 1, {name}")
        for rate in LOOP_RATES:
            loop = ReferenceLoop(settings, rate, LOOP_KL_WEIGHT)
            num_steps = _train_loop(loop, _volumes(settings, split), seconds, settings)
            rows.append({"stage": 1, "recipe": f"{LOOP}, {rate:g}", "seed": seed, "steps": num_steps})
            rows[-1] |= _reconstructions(loop.autoencoder, split, settings)
            progress(f"stage 1, {LOOP}")
        for name, changes in STAGE_TWO.items():
            row = _samples(trained[CONFIGURED], settings.with_overrides(changes, "ldm"), split, num_samples)
            rows.append({"stage": 2, "recipe": name, "seed": seed, **row})
            progress(f"stage 2, {name}")
    return {"seconds": seconds, "num_samples": num_samples, "config": config.name, "rows": rows}


def _volumes(settings: Settings, split: DataSplit) -> Iterator[list[Batch]]:
    training = settings.autoencoder.training
    plan = BatchPlan.of(training, settings.seed, 0, 1)
    return training_batches(split.train, settings.data, plan, 0, training.last_step)


def _train(step: TrainingStep, batches: Iterator[Sequence[Any]]) -> int:
    """Train until the CPU seconds are used up; return the number of steps."""
    step.schedule.start(clock=time.process_time)
    done = 0
    while not step.schedule.is_over(done):
        step(next(batches), done)
        done += 1
        step.schedule.read_clock(step.process)
    step.guard.raise_if_bad(0)
    return done


def _train_loop(loop: ReferenceLoop, batches: Iterator[list[Batch]], seconds: float, settings: Settings) -> int:
    start, done = time.process_time(), 0
    while time.process_time() - start < seconds:
        loop.step(next(batches)[0].image, done >= settings.autoencoder.training.adversarial_start_step)
        done += 1
    return done


@torch.no_grad()
def _reconstructions(network: StockAutoencoder, split: DataSplit, settings: Settings) -> dict[str, float]:
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


def _samples(network: StockAutoencoder, settings: Settings, split: DataSplit, num: int) -> dict[str, Any]:
    """Train stage 2 and return the squared MMD and relative sharpness of its samples."""
    step = LatentDiffusionStep(settings, CPU, load_weights=False)
    codec = VolumeCodec(freeze(network), settings.autoencoder, step.precision)
    latents = prepare_latents(codec, split, settings, CPU)
    step = LatentDiffusionStep(settings, CPU, codec=codec, latents=latents)
    plan = BatchPlan.of(step.training, settings.seed, 0, 1)
    num_steps = _train(step, iter(latents.training_batches(plan, 0, step.training.last_step)))
    if step.average is not None:
        step.network.load_state_dict(step.average.state_dict(), strict=False)
    samples = draw_samples(step.unet, codec, settings, step.latent_scale, settings.seed, num, batch_size=4)
    reference = load_reference(split.train, split.val, stage_two_data(settings.data))
    vectors = torch.stack([summary_vector(sample) for sample in samples])
    found, wanted = (list(map(sharpness_of, volumes)) for volumes in (samples, reference.held_out))
    return {
        "steps": num_steps,
        "mmd_squared": squared_discrepancy(vectors, reference.held_out_vectors)[0],
        "sharpness": compare_sharpness(found, wanted)["gradient_magnitude"],
    }
