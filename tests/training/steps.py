"""Training steps on the CPU whose networks hide none of their inputs, their batches, and the gradients they leave."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from data.batches import Batch
from diffusion.normalisation import Normalisation
from runtime.processes import Process
from settings import Settings
from training.autoencoder_step import AutoencoderStep
from training.ldm_step import LatentDiffusionStep
from training.step import TrainingStep

CPU = Process(torch.device("cpu"))


def gradients(step: TrainingStep) -> dict[str, torch.Tensor]:
    """Return a copy of every gradient by network and parameter."""
    return {
        f"{network}.{name}": parameter.grad.clone()
        for network, module in step.networks.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def assert_same_gradients(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare two results of `gradients` by the norms of their differences."""
    assert expected.keys() == found.keys()
    for name, wanted in expected.items():
        # A convolution's bias before a norm of single channels has no gradient but rounding.
        assert (found[name] - wanted).norm() <= tolerance * wanted.norm() or wanted.norm() < 1e-6, name


def ldm_step(values: dict[str, Any], scale: float = 0.5, **ldm: Any) -> LatentDiffusionStep:
    """Return a step with changes to sections of `ldm`, whose latents are multiplied by `scale`."""
    values = copy.deepcopy(values)
    for section, changes in ldm.items():
        values["ldm"].setdefault(section, {}).update(changes)
    step = LatentDiffusionStep(Settings.model_validate(values), CPU, load_weights=False)
    step.normalisation = Normalisation.uniform(3, scale)
    # Convolutions that begin at zero would hide what the network is given, and let no gradient pass.
    generator = torch.Generator().manual_seed(1)
    for parameter in step.unet.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return step


def autoencoder_step(values: dict[str, Any], **training: Any) -> AutoencoderStep:
    """Return a step with changes to `autoencoder.training`."""
    values = copy.deepcopy(values)
    values["autoencoder"]["training"].update(training)
    files = lambda number, micro_batch: [f"volume {micro_batch}.nii"]  # noqa: E731
    return AutoencoderStep(Settings.model_validate(values), CPU, load_weights=False, files_of=files)


def make_batches(step: AutoencoderStep, batch_size: int, total: int = 4) -> list[Batch]:
    """Return volumes of uniform noise, the same however they are divided."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand((total, 1, *step.settings.training_grid), generator=generator) * 2 - 1
    return [
        Batch(images[i : i + batch_size], tuple(range(i, i + batch_size)), ("a.nii",) * batch_size)
        for i in range(0, total, batch_size)
    ]
