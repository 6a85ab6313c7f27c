"""The runs: both stages with each kind of optimizer states, and stage 1 with each bottleneck."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data import BatchPlan, DataSplit, prepare_volumes, training_batches, validation_batches
from dev.quantised.document import EIGHT_BIT, FLOAT32, NUDGED, Row
from diffusion.frozen_autoencoder import freeze
from diffusion.latents import prepare_latents, stage_two_data
from diffusion.volume_codec import VolumeCodec
from evaluation.autoencoder_validation import reconstruct_and_measure
from evaluation.ldm_validation import LdmValidation
from losses import edge_loss, reconstruction_loss
from models import StockAutoencoder
from models.bottleneck import code_use
from runtime.processes import Process
from settings import Settings, load_settings
from training.autoencoder_step import AutoencoderStep
from training.ldm_step import LatentDiffusionStep
from training.step import TrainingStep

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
CPU = Process(torch.device("cpu"))
LAST = 20
NUDGE = 1e-6
"""What is added to one weight in a run that shows how far rounding alone leads."""


@dataclass(frozen=True)
class Volumes:
    """Which volumes the runs train on, and how long."""

    folder: str
    grid: tuple[int, ...]
    steps: int

    def settings(self, overrides: Sequence[str]) -> Settings:
        """Return the settings of quickstart on these volumes."""
        fixed = [
            f"data.source={self.folder}",
            f"data.voxel_size={list(self.grid)}",
            f"autoencoder.training.max_steps={self.steps}",
            f"ldm.training.max_steps={self.steps}",
            *("device.type=cpu", "data.num_workers=0", "data.persistent_workers=false", "ldm.latents.cache=memory"),
        ]
        return load_settings(CONFIG, [*fixed, *overrides], stage="ldm")


def compare_states(volumes: Volumes, seed: int) -> Iterator[Row]:
    """Train both stages with each kind of states; yield a row for each. All of stage 2 has the same latents."""
    network: StockAutoencoder | None = None
    for stage in (1, 2):
        for kind in (FLOAT32, EIGHT_BIT, NUDGED):
            states = EIGHT_BIT if kind == EIGHT_BIT else FLOAT32
            settings = volumes.settings([f"seed={seed}", f"device.optimizer_states={states}"])
            split = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
            if stage == 1:
                step, row = _stage_one(settings, split, nudge=kind == NUDGED)
                network = network or step.autoencoder
            else:
                assert network is not None, "stage 1 comes first"
                row = _stage_two(network, settings, split, nudge=kind == NUDGED)
            yield {"stage": stage, "seed": seed, "states": kind, "steps": volumes.steps, **row}


def bottleneck_row(volumes: Volumes, overrides: Sequence[str]) -> Row:
    """Train stage 1 with the given keys; return what its codes are, how they are used, and the quality."""
    settings = volumes.settings(overrides)
    split = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
    start = time.process_time()
    _, row = _stage_one(settings, split)
    s = settings.autoencoder
    size = {} if s.num_codes is None else {"codes": s.num_codes, "bits": math.log2(s.num_codes)}
    spent = {"seed": settings.seed, "steps": volumes.steps, "cpu_seconds": time.process_time() - start}
    return {"bottleneck": s.bottleneck, **size, **spent, **row}


def _stage_one(settings: Settings, split: DataSplit, nudge: bool = False) -> tuple[AutoencoderStep, dict[str, float]]:
    step = AutoencoderStep(settings, CPU)
    plan = BatchPlan.of(step.training, settings.seed, 0, 1)
    batches = training_batches(split.train, settings.data, plan, 0, step.training.last_step)
    loss = _train(step, batches, nudge)
    return step, {"loss": loss, **_held_out(step, split)}


def _stage_two(network: StockAutoencoder, settings: Settings, split: DataSplit, nudge: bool) -> dict[str, float]:
    step = LatentDiffusionStep(settings, CPU, load_weights=False)
    codec = VolumeCodec(freeze(network), settings.autoencoder, step.precision)
    latents = prepare_latents(codec, split, settings, CPU)
    step = LatentDiffusionStep(settings, CPU, codec=codec, latents=latents)
    plan = BatchPlan.of(step.training, settings.seed, 0, 1)
    loss = _train(step, latents.training_batches(plan, 0, step.training.last_step), nudge)
    return {"loss": loss, "held_out_loss": LdmValidation(step, latents)()[0]["val_diffusion"]}


def _train(step: TrainingStep, batches: Any, nudge: bool) -> float:
    """Train to the end; return the mean loss of the last steps."""
    if nudge:
        with torch.no_grad():
            next(p for p in step.network.parameters() if p.requires_grad).view(-1)[0].add_(NUDGE)
    weights = getattr(step, "weights", {})
    losses = []
    for number, micro_batches in enumerate(batches):
        terms = step(micro_batches, number)
        losses.append(sum(weights.get(name, 1.0) * float(terms[name]) for name in step.terms if name in terms))
    step.guard.raise_if_bad(0)
    return sum(losses[-LAST:]) / LAST


@torch.no_grad()
def _held_out(step: AutoencoderStep, split: DataSplit) -> dict[str, float]:
    """Return the loss without the bottleneck's term, the quality and the use of codes on held-out volumes."""
    s, quantiser = step.training, step.autoencoder.quantiser
    counts = None if quantiser is None else torch.zeros(quantiser.num_codes, dtype=torch.float64)
    step.autoencoder.eval()
    loss, totals = 0.0, torch.zeros(4, dtype=torch.float64)
    for batch in validation_batches(split.val, stage_two_data(step.settings.data), 0, 1):
        found, sums = reconstruct_and_measure(step, batch.image, counts)
        totals += sums
        voxels = reconstruction_loss(found, batch.image, s.reconstruction_loss)
        loss += float(voxels + s.edge_weight * edge_loss(found, batch.image, s.reconstruction_loss)) * len(found)
    psnr, ssim, _, number = totals.tolist()
    use = {} if counts is None else {name: float(value) for name, value in code_use(counts).items()}
    return {"held_out_loss": loss / number, "psnr": psnr / number, "ssim": ssim / number, **use}
