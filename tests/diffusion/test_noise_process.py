"""The noise process against MONAI's schedulers where those are exact, and against known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from monai.networks.schedulers import DDPMScheduler, RFlowScheduler

from diffusion.noise_process import SMALLEST_SIGNAL, NoiseProcess
from settings.ldm import SchedulerSettings

CPU = torch.device("cpu")
SHAPE = (3, 2, 4, 4, 4)


def process(**values) -> NoiseProcess:
    return NoiseProcess(SchedulerSettings(**values), CPU)


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


@pytest.mark.parametrize("schedule", ["scaled_linear_beta", "cosine"])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_ddpm_noises_as_monai_does(schedule, prediction):
    ours = process(schedule=schedule, prediction=prediction)
    betas = {} if schedule == "cosine" else {"beta_start": 0.0015, "beta_end": 0.0195}
    monai_prediction = {"epsilon": "epsilon", "v": "v_prediction"}[prediction]
    stock = DDPMScheduler(1000, schedule, clip_sample=False, prediction_type=monai_prediction, **betas)
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    times = torch.tensor([3, 500, 960])
    noisy = ours.add_noise(clean, noise, times)
    torch.testing.assert_close(noisy, stock.add_noise(clean, noise, times), rtol=1e-5, atol=1e-5)
    target = noise if prediction == "epsilon" else stock.get_velocity(clean, noise, times)
    torch.testing.assert_close(ours.target(clean, noise, times), target, rtol=1e-5, atol=1e-5)


def test_flow_noises_as_monai_does_and_predicts_the_way_to_the_clean_latent():
    ours, stock = process(type="rflow"), RFlowScheduler(num_train_timesteps=1000)
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    times = torch.tensor([10.0, 400.0, 990.0])
    noisy = ours.add_noise(clean, noise, times)
    torch.testing.assert_close(noisy, stock.add_noise(clean, noise, times), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.target(clean, noise, times), clean - noise)


@pytest.mark.parametrize("values", [{"prediction": "epsilon"}, {"prediction": "v"}, {"type": "rflow"}])
def test_the_true_target_gives_back_clean_latent_and_noise_and_the_slope_is_the_derivative(values):
    ours = process(**values)
    clean, noise = torch.full(SHAPE, 7.0), torch.full(SHAPE, -2.0)
    times = ours.times(torch.tensor([0.1, 0.5, 0.8]))
    noisy, target = ours.add_noise(clean, noise, times), ours.target(clean, noise, times)
    found = ours.clean_and_noise(target, noisy, times)
    for one, expected in zip(found, (clean, noise), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    change = ours.clean_and_noise(target + 1, noisy, times)[0] - found[0]
    torch.testing.assert_close(change.abs(), ours.clean_slope(times).expand(SHAPE), rtol=1e-4, atol=1e-4)


def test_uniform_numbers_become_every_timestep_equally_often():
    times = process().times((torch.arange(10_000) + 0.5) / 10_000)
    assert torch.equal(torch.bincount(times, minlength=1000), torch.full((1000,), 10))
    assert process().times(torch.tensor([0.0, 1 - 2**-24])).tolist() == [0, 999]
    torch.testing.assert_close(process(type="rflow").times(torch.tensor([0.0, 0.5])), torch.tensor([0.0, 500.0]))


@pytest.mark.parametrize("num_steps", [1, 7, 50, 1000])
def test_sampling_times_fall_from_noise_and_are_as_many_as_asked_for(num_steps):
    for ours in (process(), process(type="rflow")):
        times = ours.sampling_times(num_steps)
        assert len(times) == num_steps
        assert times == sorted(times, reverse=True)
        assert times[0] >= 0.99 * (ours.num_timesteps - 1)


@pytest.mark.parametrize("num_steps", [1, 4, 25])
def test_the_angle_of_flow_falls_by_equal_amounts(num_steps):
    ours = process(type="rflow")
    times = np.array(ours.sampling_times_by_angle(num_steps)) / ours.num_timesteps
    angles = np.arctan2(times, 1 - times)
    np.testing.assert_allclose(angles, np.pi / 2 * np.arange(num_steps, 0, -1) / num_steps, rtol=1e-9)


def test_the_cosine_schedule_is_sampled_from_where_there_is_signal():
    ours = process(schedule="cosine", prediction="epsilon")
    first = torch.tensor([int(ours.sampling_times(10)[0])])
    assert 980 < first.item() < 999
    assert ours.coefficients(first)[0].item() >= SMALLEST_SIGNAL


def test_shifted_times_are_those_of_maisi():
    from monai.networks.schedulers.rectified_flow import RFlowScheduler, timestep_transform

    numel = 64 * 64 * 32
    ours = process(type="rflow", time_shift=(numel / 32**3) ** (1 / 3))
    uniform = torch.linspace(0, 0.999, 50)
    torch.testing.assert_close(ours.training_times(uniform), timestep_transform(1000 * uniform, numel))
    theirs = RFlowScheduler(use_discrete_timesteps=False, use_timestep_transform=True)
    theirs.set_timesteps(7, input_img_size_numel=numel)
    # MONAI rounds them to half precision.
    torch.testing.assert_close(torch.tensor(ours.sampling_times(7)), theirs.timesteps.float(), rtol=5e-4, atol=0)
    torch.testing.assert_close(ours.times(torch.tensor([0.25])), torch.tensor([250.0]))
