"""Samplers on Gaussian data, whose exact solution is known: they end at it, at the order that they promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffusion.conditioning import Condition
from diffusion.noise_process import NoiseProcess
from diffusion.samplers import SAMPLERS
from diffusion.sampling import guided, sample_latents
from runtime.randomness import SampleNoise
from settings import ConfigError, Settings
from settings.ldm import LdmSettings, SchedulerSettings

CPU = torch.device("cpu")
SHAPE = (1, 2, 2, 2)
MEAN, SPREAD = 0.7, 0.4

DIFFUSION = {"schedule": "linear_beta", "num_train_timesteps": 50_000, "beta_start": 2e-6, "beta_end": 3.2e-4}
PROCESSES = {
    "epsilon": {**DIFFUSION, "prediction": "epsilon"},
    "v": {**DIFFUSION, "prediction": "v"},
    "v to pure noise": {**DIFFUSION, "prediction": "v", "zero_terminal_snr": True},
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


@pytest.mark.parametrize("name", list(PROCESSES))
def test_twelve_steps_of_the_second_order_are_closer_than_twentyfive_of_the_first(name):
    assert error(name, "dpmpp_2m", 12) < error(name, "rflow" if name == "flow" else "ddim", 25)


@pytest.mark.parametrize("name", ["epsilon", "v", "v to pure noise"])
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


@pytest.mark.parametrize(("time", "is_guided"), [(0, False), (199, False), (200, True), (700, True), (701, False)])
def test_guidance_acts_inside_its_interval_only_and_spares_the_second_half_of_the_batch_outside(time, is_guided):
    sizes = []

    class ByLabel(torch.nn.Module):
        def forward(self, noisy: Tensor, times: Tensor, class_labels: Tensor) -> Tensor:
            sizes.append(len(noisy))
            return class_labels.float().view(-1, 1, 1, 1, 1).expand_as(noisy)

    settings = LdmSettings.model_validate(
        {
            "conditioning": {"type": "class", "num_classes": 3},
            "sampling": {"guidance_scale": 4.0, "guidance_interval": [0.2, 0.7]},
        }
    )
    labels = torch.tensor([1, 2])
    guide = guided(ByLabel(), settings, Condition(labels))
    found = guide(torch.zeros(2, 3, 8, 8, 8), torch.full((2,), time))
    expected = 3 + 4 * (labels - 3) if is_guided else labels
    assert found[:, 0, 0, 0, 0].tolist() == expected.tolist()
    assert sizes == [4 if is_guided else 2]


@pytest.mark.parametrize(
    ("ldm", "found"),
    [
        ({"scheduler": {"zero_terminal_snr": True}}, "zero_terminal_snr: true with prediction epsilon"),
        (
            {"scheduler": {"type": "rflow", "zero_terminal_snr": True}, "sampling": {"sampler": "rflow"}},
            "zero_terminal_snr: true with rflow",
        ),
        ({"scheduler": {"time_sampling": "logit_normal"}}, "time_sampling: logit_normal with scheduler type ddpm"),
        (
            {
                "scheduler": {"prediction": "v", "zero_terminal_snr": True},
                "training": {"loss_weighting": "min_snr"},
            },
            "loss_weighting: min_snr with zero_terminal_snr",
        ),
        (
            {
                "scheduler": {"prediction": "v", "zero_terminal_snr": True, "num_train_timesteps": 1},
                "sampling": {"num_inference_steps": 1},
            },
            "zero_terminal_snr: true with one timestep, which cannot have both signal and none",
        ),
        (
            {"sampling": {"guidance_scale": 3.0}},
            "guidance_scale: 3 with conditioning type none, so there is no class to follow; allowed: 1",
        ),
        (
            {"conditioning": {"type": "class", "num_classes": 2, "dropout": 0.0}, "sampling": {"guidance_scale": 3.0}},
            "guidance_scale: 3 with conditioning dropout 0, so the network never learns to predict without a class",
        ),
        ({"sampling": {"guidance_interval": [0.6, 0.2]}}, "guidance_interval: 0.6 is not below 0.2; swap the two"),
        ({"sampling": {"guidance_interval": [0.6, 0.6]}}, "guidance_interval: 0.6 is not below 0.6; widen it"),
        (
            {"scheduler": {"beta_start": 0.02, "beta_end": 0.02}},
            "beta_start: 0.02 is not below beta_end (0.02); lower it",
        ),
        ({"sampling": {"sampler": "heun"}}, "heun cannot sample from scheduler type ddpm; allowed: ddim, ddpm"),
    ],
)
def test_noise_settings_that_contradict_each_other_are_refused(ldm, found):
    with pytest.raises(ConfigError) as caught:
        Settings.model_validate({"ldm": ldm})
    assert found in str(caught.value)
