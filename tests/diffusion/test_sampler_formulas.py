"""Samplers, guidance and targets against a few lines written from the papers, without any of our code."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from diffusion.conditioning import NOTHING, ConditionBatch
from diffusion.noise_process import NoiseProcess, predict
from diffusion.normalisation import Normalisation
from diffusion.sampling import VolumeSampler, guided, sample_latents
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import Settings
from settings.ldm import LdmSettings, SchedulerSettings
from training.ldm_step import LatentDiffusionStep

CPU = torch.device("cpu")
SHAPE = (2, 3, 3, 3)
POSITIONS = (4, 9, 2)
STEPS = 7


def alpha_bar(s: SchedulerSettings) -> list[float]:
    """The share of the variance that is signal, for each timestep, from a plain loop."""
    count = s.num_train_timesteps
    kept, product = [], 1.0
    for t in range(count):
        if s.schedule == "cosine":
            before, after = (math.cos((place / count + 0.008) / 1.008 * math.pi / 2) ** 2 for place in (t, t + 1))
            beta = min(1 - after / before, 0.999)
        else:
            beta = (0.0015**0.5 + (0.0195**0.5 - 0.0015**0.5) * t / (count - 1)) ** 2
        product *= 1 - beta
        kept.append(product)
    return kept


def network(noisy: Tensor, times: Tensor) -> Tensor:
    """Stands for a U-Net: some smooth function of both its arguments."""
    return torch.tanh(noisy) * 0.8 + 0.1 * (times.float() / 1000).view(-1, 1, 1, 1, 1) - 0.05


SCHEDULES = ["scaled_linear_beta", "cosine"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_noised_latents_and_targets_are_the_formulas_at_every_kind_of_time(schedule):
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn((5, *SHAPE), generator=generator) for _ in range(2))
    times = torch.tensor([0, 1, 499, 500, 999])
    for prediction in ("epsilon", "v"):
        settings = SchedulerSettings(schedule=schedule, prediction=prediction)
        process, kept = NoiseProcess(settings, CPU), alpha_bar(settings)
        noisy, target = process.add_noise(clean, noise, times), process.target(clean, noise, times)
        for place, t in enumerate(times.tolist()):
            a, b = math.sqrt(kept[t]), math.sqrt(1 - kept[t])
            torch.testing.assert_close(noisy[place], a * clean[place] + b * noise[place], rtol=1e-4, atol=1e-5)
            wanted = noise[place] if prediction == "epsilon" else a * noise[place] - b * clean[place]
            torch.testing.assert_close(target[place], wanted, rtol=1e-4, atol=1e-5)


def test_uniform_numbers_become_every_timestep_equally_often():
    process = NoiseProcess(SchedulerSettings(), CPU)
    times = process.times((torch.arange(10_000) + 0.5) / 10_000)
    assert torch.equal(torch.bincount(times, minlength=1000), torch.full((1000,), 10))
    assert process.times(torch.tensor([0.0, 1 - 2**-24])).tolist() == [0, 999]
    flow = NoiseProcess(SchedulerSettings(type="rflow"), CPU)
    torch.testing.assert_close(flow.times(torch.tensor([0.0, 0.5])), torch.tensor([0.0, 500.0]))


def implied(prediction: str, output: Tensor, x: Tensor, kept: float) -> tuple[Tensor, Tensor]:
    a, b = math.sqrt(kept), math.sqrt(1 - kept)
    if prediction == "epsilon":
        return (x - b * output) / a, output
    return a * x - b * output, a * output + b * x


@pytest.mark.parametrize("schedule", ["scaled_linear_beta", "cosine"])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("eta", [0, 1])
def test_ddim_and_ddpm_take_the_steps_of_the_ddim_paper(schedule, prediction, eta):
    """Equations 12 and 16 of Song et al. 2021: eta 0 is DDIM, eta 1 is DDPM."""
    settings = SchedulerSettings(schedule=schedule, prediction=prediction)
    process, kept, noise = NoiseProcess(settings, CPU), alpha_bar(settings), SampleNoise(3, CPU)
    usable = sum(math.sqrt(share) >= 0.01 for share in kept)
    times = [round((usable - 1) * (STEPS - 1 - i) / (STEPS - 1)) for i in range(STEPS)]
    assert times[-1] == 0
    x = noise.normal("sample", POSITIONS, SHAPE)
    for i, t in enumerate(times):
        x0, e = implied(prediction, network(x, torch.full((3,), t)), x, kept[t])
        if i == STEPS - 1:
            x = x0
            break
        now, after = kept[t], kept[times[i + 1]]
        sigma = eta * math.sqrt((1 - after) / (1 - now)) * math.sqrt(1 - now / after)
        x = math.sqrt(after) * x0 + math.sqrt(max(0.0, 1 - after - sigma**2)) * e
        if eta:
            x = x + sigma * noise.normal(f"sample step {i}", POSITIONS, SHAPE)
    found = sample_latents(network, process, noise, POSITIONS, SHAPE, STEPS, "ddpm" if eta else "ddim")
    torch.testing.assert_close(found, x, rtol=2e-3, atol=2e-3)


def test_flow_takes_eulers_steps_from_noise_to_clean():
    process, noise = NoiseProcess(SchedulerSettings(type="rflow"), CPU), SampleNoise(3, CPU)
    x = noise.normal("sample", POSITIONS, SHAPE)
    for i in range(STEPS):
        x = x + network(x, torch.full((3,), 1000 * (1 - i / STEPS))) / STEPS
    found = sample_latents(network, process, noise, POSITIONS, SHAPE, STEPS)
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


def test_fresh_noise_is_new_at_every_step():
    """With the same noise at each step the added parts would be copies of one another."""
    process, noise = NoiseProcess(SchedulerSettings(), CPU), SampleNoise(3, CPU)
    asked: list[str] = []
    drawn: list[Tensor] = []
    normal = noise.normal

    def listening(purpose, positions, shape):
        asked.append(purpose)
        drawn.append(normal(purpose, positions, shape))
        return drawn[-1]

    noise.normal = listening  # type: ignore[method-assign]
    sample_latents(network, process, noise, POSITIONS, SHAPE, STEPS, "ddpm")
    assert len(asked) == len(set(asked)) == STEPS
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


class ByLabel(nn.Module):
    """Predicts a number that depends on the label alone, so that each use of a label can be seen."""

    def forward(self, noisy: Tensor, times: Tensor, class_labels: Tensor) -> Tensor:
        return (10.0 ** class_labels.float()).view(-1, 1, 1, 1, 1).expand_as(noisy)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0, 7.5])
def test_guidance_is_without_class_plus_scale_times_the_difference(scale):
    settings = LdmSettings.model_validate(
        {"conditioning": {"type": "class", "num_classes": 3}, "sampling": {"guidance_scale": scale}}
    )
    noisy, labels = torch.zeros(3, 3, 8, 8, 8), torch.tensor([0, 2, 1])
    found = guided(ByLabel(), settings, ConditionBatch({"class_label": labels}))(noisy, torch.tensor([5, 5, 5]))
    for place, label in enumerate(labels.tolist()):
        # Class 3 is the hidden label: 10 ** 3.
        expected = 1000.0 + scale * (10.0**label - 1000.0)
        torch.testing.assert_close(found[place], torch.full((3, 8, 8, 8), expected), rtol=1e-5, atol=1e-3)


def test_padding_is_zeros_at_the_far_ends_and_is_cut_off_again():
    seen: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
            seen.append(noisy)
            return noisy * 2

    noisy = 1 + torch.rand(2, 3, 5, 6, 8)
    found = predict(Keeps(), noisy, torch.zeros(2), NOTHING, 4)
    torch.testing.assert_close(found, 2 * noisy)
    assert seen[0].shape == (2, 3, 8, 8, 8)
    torch.testing.assert_close(seen[0][:, :, :5, :6, :8], noisy)
    assert seen[0].sum().item() == pytest.approx(noisy.sum().item(), rel=1e-5)


def make_step(values, **ldm) -> LatentDiffusionStep:
    values = copy.deepcopy(values)
    for section, changes in ldm.items():
        values["ldm"].setdefault(section, {}).update(changes)
    step = LatentDiffusionStep(Settings.model_validate(values), Process(CPU), load_weights=False)
    generator = torch.Generator().manual_seed(1)
    for parameter in step.unet.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return step


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_volumes_are_drawn_with_the_sampler_and_the_guidance_of_the_config(tiny_values, sampler):
    conditioning = {"type": "class", "num_classes": 3}
    step = make_step(tiny_values, conditioning=conditioning, sampling={"sampler": sampler, "guidance_scale": 3.0})
    step.unet.eval()
    labels = torch.tensor([1, 1])

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        plain = step.unet(noisy, times, class_labels=torch.full_like(labels, 3))
        return plain + 3.0 * (step.unet(noisy, times, class_labels=labels) - plain)

    latents = sample_latents(
        predict, step.noise_process, SampleNoise(6, CPU), [0, 5], step.settings.latent_shape, 4, sampler
    )
    step.unet.train()
    drawing = VolumeSampler(step.unet, step.codec, step.settings, Normalisation.uniform(3, 0.5), 6, batch_size=2)
    found = list(drawing.draw([0, 5], lambda _: ConditionBatch({"class_label": labels})))
    for latent, volume in zip(latents, found, strict=True):
        torch.testing.assert_close(volume, step.codec.decode(latent / 0.5), rtol=1e-3, atol=1e-4)
    assert step.unet.training
