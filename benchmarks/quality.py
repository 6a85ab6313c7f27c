"""Held-out PSNR after the same number of steps on the same real patches: our step against the 3d_ldm-style loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peaks import REFERENCE
from benchmarks.real_volumes import patches
from benchmarks.reference_loop import ReferenceLoop
from benchmarks.variants import base_settings
from data import Batch
from evaluation.pair_metrics import psnr
from runtime.processes import Process
from settings import Settings
from training.autoencoder_step import AutoencoderStep

KL_WEIGHT = 1e-7  # of the sum over the latent
LEARNING_RATE = 5e-4


def compare_quality(
    num_steps: int, size: int, channels: tuple[int, ...], batch_size: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Train both loops from the same weights on the same batches, step by step in turn, and return their PSNR."""
    settings = _settings(num_steps, size, channels, batch_size)
    train, held_out = patches(12 * batch_size, size, seed=1), patches(9, size, seed=2)
    reference = ReferenceLoop(settings, LEARNING_RATE, KL_WEIGHT)
    ours = AutoencoderStep(settings, Process(torch.device("cpu")))
    ours.autoencoder.load_state_dict(reference.autoencoder.state_dict())
    assert ours.discriminator is not None, "the benchmark trains with a discriminator"
    ours.discriminator.load_state_dict(reference.discriminator.state_dict())

    order = torch.Generator().manual_seed(settings.seed)
    seconds = {"ours": 0.0, "reference": 0.0}
    history = []
    for step in range(num_steps):
        chosen = torch.randperm(len(train), generator=order)[:batch_size]
        batch = Batch(train[chosen], tuple(range(step * batch_size, (step + 1) * batch_size)), None, ("",) * batch_size)
        start = time.perf_counter()
        ours([batch], step)
        middle = time.perf_counter()
        reference.step(batch.image, is_adversarial=ours.is_adversarial(step))
        seconds["ours"] += middle - start
        seconds["reference"] += time.perf_counter() - middle
        if (step + 1) % max(1, num_steps // 5) == 0:
            values = {"step": step + 1, "ours": _psnr(ours.autoencoder, held_out)}
            history.append({**values, "reference": _psnr(reference.autoencoder, held_out)})
        progress(f"step {step + 1}")
    return {
        "num_steps": num_steps,
        "patch": size,
        "channels": list(channels),
        "batch_size": batch_size,
        "reference": REFERENCE,
        "history": history,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }


def _settings(num_steps: int, size: int, channels: tuple[int, ...], batch_size: int) -> Settings:
    settings = base_settings((size,) * 3, mixed_precision=False, channels=channels)
    training = {
        "batch_size": batch_size,
        "learning_rate": LEARNING_RATE,
        "discriminator_learning_rate": LEARNING_RATE,
        # Ours is per voxel: the same objective as a sum with KL_WEIGHT.
        "kl_weight": KL_WEIGHT * size**3,
        "adversarial_weight": 0.01,
        "adversarial_start_step": num_steps // 2,
        "max_steps": num_steps,
        # Patches of this size fit everywhere, so neither side spends time to save memory.
        "use_gradient_checkpointing": False,
    }
    changes = {f"autoencoder.training.{name}": value for name, value in training.items()}
    return settings.with_overrides({**changes, "device.type": "cpu"})


@torch.no_grad()
def _psnr(network: Any, held_out: torch.Tensor) -> float:
    network.eval()
    values = [psnr(network.decode(network.encode(volume[None])[0]), volume[None]) for volume in held_out]
    network.train()
    return float(torch.cat(values).mean())
