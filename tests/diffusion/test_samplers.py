"""Samplers on Gaussian data, whose exact solution is known: they end at it, at the order that they promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffusion.conditioning import ConditionBatch
from diffusion.noise_process import NoiseProcess
from diffusion.sampling import SAMPLERS, guided, sample_latents
from runtime.randomness import SampleNoise
from settings import ConfigError, Settings
from settings.ldm import LdmSettings, SchedulerSettings

CPU = torch.device("cpu")
SHAPE = (1, 2, 2, 2)
MEAN, SPREAD = 0.7, 0.4

DIFFUSION = {"schedule": "cosine", "num_train_timesteps": 50_000}
PROCESSES = {
    "epsilon": {**DIFFUSION, "prediction": "epsilon"},
    "v": {**DIFFUSION, "prediction": "v"},
    "flow": {"type": "rflow"},
}


class GaussianData:
    """The exact denoiser of voxels drawn from a normal distribution, and the exact path from noise to them."""

    def __init__(self, process: NoiseProcess) -> None:
        self.process = process
        self.num_calls = 0

    def spread(self, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        signal, level = (part.double() for part in self.process.coefficients(times))
        return signal, level, (signal.square() * SPREAD**2 + level.square()).sqrt()

    def clean(self, noisy: Tensor, times: Tensor) -> Tensor:
        signal, _, spread = self.spread(times)
        return MEAN + signal * (SPREAD / spread).square() * (noisy - signal * MEAN)

    def predict(self, noisy: Tensor, times: Tensor) -> Tensor:
        self.num_calls += 1
        signal, level, _ = self.spread(times)
        clean = self.clean(noisy.double(), times)
        return self.process.target(clean, (noisy - signal * clean) / level, times)

    def end_of_path(self, noise: Tensor, first: Tensor) -> Tensor:
        """Follow the probability flow from the time `first` to clean data exactly."""
        signal, _, spread = self.spread(first)
        return MEAN + SPREAD * (noise.double() - signal * MEAN) / spread


def error(name: str, sampler: str, num_steps: int) -> float:
    """Return the largest distance of eight samples from the ends of their exact paths."""
    process = NoiseProcess(SchedulerSettings.model_validate(PROCESSES[name]), CPU)
    data, noise = GaussianData(process), SampleNoise(0, CPU)
    found = sample_latents(data.predict, process, noise, range(8), SHAPE, num_steps, sampler)
    first = torch.full((8,), process.sampling_times(1)[0], dtype=torch.float32 if process.is_flow else torch.int64)
    exact = data.end_of_path(noise.normal("sample", range(8), SHAPE), first)
    return float((found.double() - exact).abs().max())


ORDERS = [
    *((name, sampler, order) for name in list(PROCESSES)[:3] for sampler, order in (("ddim", 1), ("dpmpp_2m", 2))),
    *(("flow", sampler, order) for sampler, order in (("rflow", 1), ("heun", 2), ("dpmpp_2m", 2))),
]


@pytest.mark.parametrize(("name", "sampler", "order"), ORDERS)
def test_the_error_falls_at_the_order_of_the_sampler(name, sampler, order):
    coarse, fine = error(name, sampler, 160), error(name, sampler, 480)
    assert math.log(coarse / fine, 3) == pytest.approx(order, abs=0.4)


@pytest.mark.parametrize("name", ["epsilon", "v"])
def test_ddpm_draws_the_mean_and_the_spread_of_the_data(name):
    process = NoiseProcess(SchedulerSettings.model_validate(PROCESSES[name]), CPU)
    drawn = sample_latents(
        GaussianData(process).predict, process, SampleNoise(1, CPU), range(400), SHAPE, 240, sampler="ddpm"
    )
    assert drawn.mean().item() == pytest.approx(MEAN, abs=0.03)
    assert drawn.std().item() == pytest.approx(SPREAD, rel=0.08)


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_one_step_is_the_denoisers_mean_and_more_timesteps_than_the_schedule_has_do_no_harm(sampler):
    is_flow = sampler in ("rflow", "heun")
    values = {"type": "rflow"} if is_flow else {"schedule": "cosine", "prediction": "v", "num_train_timesteps": 40}
    process = NoiseProcess(SchedulerSettings.model_validate(values), CPU)
    data, noise = GaussianData(process), SampleNoise(0, CPU)
    found = sample_latents(data.predict, process, noise, range(2), SHAPE, 1, sampler)
    first = torch.full((2,), process.sampling_times(1)[0], dtype=torch.float32 if is_flow else torch.int64)
    expected = data.clean(noise.normal("sample", range(2), SHAPE).double(), first)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert data.num_calls == 1
    # Rounded to the usable timesteps, some of these are equal.
    assert torch.isfinite(sample_latents(data.predict, process, noise, range(2), SHAPE, 40, sampler)).all()


@pytest.mark.parametrize(("sampler", "num_calls"), [("ddim", 6), ("ddpm", 6), ("dpmpp_2m", 6), ("heun", 11)])
def test_the_network_is_called_once_a_step_and_by_heun_twice_but_for_the_last(sampler, num_calls):
    process = NoiseProcess(SchedulerSettings.model_validate({"type": "rflow"} if sampler == "heun" else {}), CPU)
    data, told = GaussianData(process), []
    sample_latents(
        data.predict, process, SampleNoise(0, CPU), [0], SHAPE, 6, sampler, on_step=lambda: told.append(data.num_calls)
    )
    assert data.num_calls == num_calls
    assert len(told) == 6


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_guidance_extrapolates_and_without_it_the_batch_is_not_doubled(scale):
    sizes = []

    class ByLabel(torch.nn.Module):
        def forward(self, noisy: Tensor, times: Tensor, class_labels: Tensor) -> Tensor:
            sizes.append(len(noisy))
            return class_labels.float().view(-1, 1, 1, 1, 1).expand_as(noisy)

    settings = LdmSettings.model_validate(
        {"conditioning": {"type": "class", "num_classes": 3}, "sampling": {"guidance_scale": scale}}
    )
    labels = torch.tensor([1, 2])
    guide = guided(ByLabel(), settings, ConditionBatch({"class_label": labels}))
    found = guide(torch.zeros(2, 3, 8, 8, 8), torch.full((2,), 500))
    assert found[:, 0, 0, 0, 0].tolist() == (3 + scale * (labels - 3)).tolist()
    assert sizes == [4 if scale == 4 else 2]


@pytest.mark.parametrize(
    ("ldm", "found"),
    [
        ({"scheduler": {"time_shift": 2.0}}, "time_shift: 2.0 with scheduler type ddpm; allowed: 1"),
        (
            {"sampling": {"guidance_scale": 3.0}},
            "guidance_scale: 3 with conditioning type none, so there is no class to follow; allowed: 1",
        ),
        (
            {"conditioning": {"type": "class", "num_classes": 2, "dropout": 0.0}, "sampling": {"guidance_scale": 3.0}},
            "guidance_scale: 3 with conditioning dropout 0, so the network never learns to predict without a condition",
        ),
        ({"sampling": {"sampler": "heun"}}, "heun cannot sample from scheduler type ddpm; allowed: ddim, ddpm"),
    ],
)
def test_noise_settings_that_contradict_each_other_are_refused(ldm, found):
    with pytest.raises(ConfigError) as caught:
        Settings.model_validate({"ldm": ldm})
    assert found in str(caught.value)
