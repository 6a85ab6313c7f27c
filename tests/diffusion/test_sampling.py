"""Samplers against a distribution with a known answer, and samples that depend on nothing but seed and position."""

from __future__ import annotations

import copy

import pytest
import torch

from diffusion.conditioning import ConditionBatch
from diffusion.noise_process import NoiseProcess
from diffusion.normalisation import Normalisation
from diffusion.sampling import VolumeSampler, sample_latents
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import Settings
from settings.ldm import SchedulerSettings
from training.ldm_step import LatentDiffusionStep

CPU = Process(torch.device("cpu"))
SHAPE = (1, 2, 2, 2)
PROCESSES = {
    "epsilon": {"prediction": "epsilon"},
    "v": {"prediction": "v"},
    "flow": {"type": "rflow"},
}
SAMPLERS = [
    *((name, sampler) for name in ("epsilon", "v") for sampler in ("ddpm", "ddim", "dpmpp_2m")),
    *(("flow", sampler) for sampler in ("rflow", "heun", "dpmpp_2m")),
]


def make_process(name: str) -> NoiseProcess:
    return NoiseProcess(SchedulerSettings.model_validate(PROCESSES[name]), CPU.device)


@pytest.mark.parametrize(("prediction", "sampler"), SAMPLERS)
def test_with_the_exact_denoiser_every_sample_is_one_of_two_point_masses(prediction, sampler):
    """The posterior mean of two point masses at -3 and 1 is known, so any error is the sampler's own."""
    process = make_process(prediction)
    points = torch.tensor([-3.0, 1.0])

    def predict(noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        signal, level = process.coefficients(times)
        logits = torch.stack([-((noisy - signal * p) ** 2).flatten(1).sum(1) for p in points], dim=1)
        weights = torch.softmax(logits / (2 * level.flatten()[:, None] ** 2).clamp_min(1e-12), dim=1)
        clean = (weights @ points).view(-1, 1, 1, 1, 1).expand_as(noisy)
        noise = (noisy - signal * clean) / level.clamp_min(1e-6)
        return process.target(clean, noise, times)

    drawn = sample_latents(predict, process, SampleNoise(0, CPU.device), range(400), SHAPE, 50, sampler)
    distance = (drawn.flatten(1)[:, :, None] - points).abs().amax(dim=1)
    assert distance.amin(dim=1).max() < 0.02
    assert 0.42 < (distance.argmin(dim=1) == 0).double().mean() < 0.58


def make_step(values, **ldm) -> LatentDiffusionStep:
    values = copy.deepcopy(values)
    for section, changes in ldm.items():
        values["ldm"].setdefault(section, {}).update(changes)
    step = LatentDiffusionStep(Settings.model_validate(values), CPU, load_weights=False)
    # Convolutions that begin at zero would hide timestep and class.
    generator = torch.Generator().manual_seed(1)
    for parameter in step.unet.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return step


def draw(step: LatentDiffusionStep, positions, batch_size: int, seed: int = 5, **options) -> torch.Tensor:
    normalisation = Normalisation.uniform(3, 0.5)
    sampler = VolumeSampler(step.unet, step.codec, step.settings, normalisation, seed, batch_size)
    return torch.stack(list(sampler.draw(positions, **options)))


@pytest.mark.parametrize("sampler", ["ddim", "ddpm", "dpmpp_2m"])
def test_a_sample_is_a_function_of_seed_and_position_whatever_the_batch_size(tiny_values, sampler):
    step = make_step(tiny_values, sampling={"sampler": sampler})
    one_by_one = draw(step, range(5), 1)
    assert one_by_one.shape == (5, 1, 16, 16, 16)
    torch.testing.assert_close(draw(step, range(5), 3), one_by_one, rtol=0, atol=1e-5)
    torch.testing.assert_close(draw(step, [4, 2], 2), one_by_one[[4, 2]], rtol=0, atol=1e-5)
    assert (draw(step, range(1), 1, seed=6) - one_by_one[:1]).abs().mean() > 1e-3
    assert (one_by_one[0] - one_by_one[1]).abs().mean() > 1e-3


def test_every_step_of_every_batch_reaches_the_progress_bar(tiny_values):
    step = make_step(tiny_values)
    calls: list[int] = []
    draw(step, range(3), 2, on_step=lambda: calls.append(1))
    assert len(calls) == 2 * step.settings.ldm.sampling.num_inference_steps


def test_classes_take_turns_unless_one_is_asked_for(tiny_values):
    step = make_step(tiny_values, conditioning={"type": "class", "num_classes": 3})
    in_turn = draw(step, range(3), 3)

    def asked(label: int) -> torch.Tensor:
        condition = ConditionBatch({"class_label": torch.tensor([label])})
        return draw(step, [1], 1, condition_of=lambda positions: condition)

    torch.testing.assert_close(asked(1), in_turn[1:2], rtol=0, atol=1e-5)
    assert (asked(2) - in_turn[1:2]).abs().max() > 1e-4
