"""Held-out PSNR after the same number of steps on the same real patches: our step beside 3d_ldm-style loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

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
SAME_OBJECTIVE, TUTORIAL = "3d_ldm-style, our objective", "3d_ldm-style, the tutorial's objective"


def compare_quality(
    num_steps: int, size: int, channels: tuple[int, ...], batch_size: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Train all three from the same weights on the same batches and noise, step by step in turn; return their PSNR."""
    settings = _settings(num_steps, size, channels, batch_size)
    train, held_out = patches(12 * batch_size, size, seed=1), patches(9, size, seed=2)
    loops = {
        name: ReferenceLoop(settings, LEARNING_RATE, KL_WEIGHT, has_our_objective=name == SAME_OBJECTIVE)
        for name in (SAME_OBJECTIVE, TUTORIAL)
    }
    ours = AutoencoderStep(settings, Process(torch.device("cpu")))
    start_alike(ours, loops[SAME_OBJECTIVE])
    networks = {"ours": ours.autoencoder, **{name: loop.autoencoder for name, loop in loops.items()}}

    order = torch.Generator().manual_seed(settings.seed)
    seconds = dict.fromkeys(networks, 0.0)
    history = []
    for step in range(num_steps):
        chosen = torch.randperm(len(train), generator=order)[:batch_size]
        batch = Batch(train[chosen], tuple(range(step * batch_size, (step + 1) * batch_size)), None, ("",) * batch_size)
        noise = latent_noise(ours, batch)
        start = time.process_time()
        ours([batch], step)
        seconds["ours"] += time.process_time() - start
        for name, loop in loops.items():
            start = time.process_time()
            loop.step(batch.image, ours.is_adversarial(step), noise)
            seconds[name] += time.process_time() - start
        if (step + 1) % max(1, num_steps // 5) == 0:
            psnrs = {name: _psnr(network, held_out) for name, network in networks.items()}
            history.append({"step": step + 1, **psnrs})
        progress(f"step {step + 1}")
    return {
        "num_steps": num_steps,
        "patch": size,
        "channels": list(channels),
        "batch_size": batch_size,
        "history": history,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }


def start_alike(ours: AutoencoderStep, loop: ReferenceLoop) -> None:
    """Copy the weights of a loop's networks into ours."""
    assert ours.discriminator is not None, "the benchmark trains with a discriminator"
    ours.autoencoder.load_state_dict(loop.autoencoder.state_dict())
    ours.discriminator.load_state_dict(loop.discriminator.state_dict())


def latent_noise(ours: AutoencoderStep, batch: Batch) -> torch.Tensor:
    """Return the noise that our step draws for a batch's latents."""
    settings = ours.settings.autoencoder
    grid = settings.latent_grid(batch.image.shape[2:])
    return ours.noise.normal("latent", batch.positions, (settings.latent_channels, *grid))


def _settings(num_steps: int, size: int, channels: tuple[int, ...], batch_size: int) -> Settings:
    settings = base_settings((size,) * 3, mixed_precision=False, channels=channels)
    training = {
        "batch_size": batch_size,
        "learning_rate": LEARNING_RATE,
        "discriminator_learning_rate": LEARNING_RATE,
        # The loops do not clip.
        "max_grad_norm": 0.0,
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
