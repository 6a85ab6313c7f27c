"""How well the U-Net predicts held-out latents, and what samples from fixed seeds look like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn import functional as F

from data import to_unit
from diffusion.latents import Latents
from diffusion.noise_process import predict_padded
from diffusion.sampling import draw_volumes
from evaluation.pictures import middle_planes, tile
from evaluation.previews import Preview, ViewerVolume
from training.ldm_step import LatentDiffusionStep

NOISE_LEVELS = (0.125, 0.375, 0.625, 0.875)
"""At which shares of the process's time the held-out loss is taken; always the same, with the same noise."""


def validate_ldm(step: LatentDiffusionStep, latents: Latents) -> tuple[dict[str, float], Preview | None]:
    """Return the held-out diffusion loss over all processes, and the first process's preview of samples.

    Uses the averaged weights when there are any. Every call meets the same latents, times, noise and seeds.
    """
    with _for_use(step):
        metrics = _held_out_loss(step, latents)
        is_shown = step.process.is_first and step.settings.ldm.sampling.num_previews
        preview = sample_preview(step) if is_shown else None
    return metrics, preview


@torch.no_grad()
def _held_out_loss(step: LatentDiffusionStep, latents: Latents) -> dict[str, float]:
    totals = torch.zeros(len(NOISE_LEVELS) + 1, dtype=torch.float64)
    conditioning = step.settings.ldm.conditioning
    for batch in latents.validation_batches(step.codec.encode, step.process):
        # The mean of the latent: nothing random but the noise below.
        clean = batch.mean.to(step.process.device) * step.latent_scale
        labels = None if conditioning.type == "none" or batch.labels is None else batch.labels.to(step.process.device)
        for number, level in enumerate(NOISE_LEVELS):
            noise = step.noise.normal(f"validation {level}", batch.positions, clean.shape[1:])
            times = step.noise_process.times(torch.full((1,), level, device=step.process.device))
            noisy = step.noise_process.add_noise(clean, noise, times)
            with step.precision.autocast():
                prediction = predict_padded(step.unet, noisy, times, labels, step.settings.ldm.unet.downsampling)
            target = step.noise_process.target(clean, noise, times)
            totals[number] += F.mse_loss(prediction.float(), target).double().cpu()
        totals[-1] += 1
    *losses, count = step.process.sum(totals).tolist()
    if not count:  # a data set of one volume has none to hold out
        return {}
    by_level = {f"val_diffusion_{level:g}": loss / count for level, loss in zip(NOISE_LEVELS, losses, strict=True)}
    return {"val_diffusion": sum(by_level.values()) / len(by_level), **by_level}


def sample_preview(step: LatentDiffusionStep) -> Preview:
    """Return the preview samples, in the picture one sample a row; the same seeds at each call."""
    number = step.settings.ldm.sampling.num_previews
    volumes = draw_volumes(
        step.unet,
        step.codec,
        step.settings,
        step.latent_scale,
        step.settings.seed,
        range(number),
        batch_size=step.training.batch_size,
    )
    planes, kept = [], {}
    for place, volume in enumerate(volumes):
        planes.append(middle_planes(to_unit(volume[0]).cpu()))
        kept[f"sample_{place}"] = ViewerVolume.of(volume)
    return Preview(tile(planes), kept)


@contextmanager
def _for_use(step: LatentDiffusionStep) -> Iterator[None]:
    """Let the U-Net be what a user will get: averaged weights, eval mode."""
    step.unet.eval()
    with step.average.swapped_in() if step.average is not None else nullcontext():
        yield
    step.unet.train()
