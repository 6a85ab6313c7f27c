"""Samplers on data whose exact solution is known and against the papers, and samples of nothing but seed and place."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from diffusion.conditioning import NOTHING, ConditionBatch
from diffusion.noise_process import NoiseProcess, predict
from diffusion.normalisation import Normalisation
from diffusion.sampling import SAMPLERS, VolumeSampler, guided, num_predictions, sample_latents
from runtime.randomness import SampleNoise
from settings import Settings
from settings.ldm import LdmSettings, SchedulerSettings
from tests.diffusion.test_noise_process import alpha_bar
from tests.training.steps import ldm_step
from training.ldm_step import LatentDiffusionStep

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

    def spread(self, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        signal, level = (part.double() for part in self.process.coefficients(times))
        return signal, level, (signal.square() * SPREAD**2 + level.square()).sqrt()

    def clean(self, noisy: Tensor, times: Tensor) -> Tensor:
        signal, _, spread = self.spread(times)
        return MEAN + signal * (SPREAD / spread).square() * (noisy - signal * MEAN)

    def predict(self, noisy: Tensor, times: Tensor) -> Tensor:
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
    *((name, sampler, order) for name in PROCESSES for sampler, order in (("ddim", 1), ("dpmpp_2m", 2))),
    *(("flow", sampler, order) for sampler, order in (("rflow", 1), ("heun", 2))),
]


@pytest.mark.parametrize(("name", "sampler", "order"), ORDERS)
def test_the_error_falls_at_the_order_of_the_sampler(name, sampler, order):
    coarse, fine = error(name, sampler, 160), error(name, sampler, 480)
    assert math.log(coarse / fine, 3) == pytest.approx(order, abs=0.4)


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
    # Rounded to the usable timesteps, some of these are equal.
    assert torch.isfinite(sample_latents(data.predict, process, noise, range(2), SHAPE, 40, sampler)).all()


POSITIONS, STEPS, PAPER_SHAPE = (4, 9, 2), 7, (2, 3, 3, 3)


def network(noisy: Tensor, times: Tensor) -> Tensor:
    """Stands for a U-Net: some smooth function of both its arguments."""
    return torch.tanh(noisy) * 0.8 + 0.1 * (times.float() / 1000).view(-1, 1, 1, 1, 1) - 0.05


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
    x = noise.normal("sample", POSITIONS, PAPER_SHAPE)
    for i, t in enumerate(times):
        a, b, output = math.sqrt(kept[t]), math.sqrt(1 - kept[t]), network(x, torch.full((3,), t))
        x0, e = ((x - b * output) / a, output) if prediction == "epsilon" else (a * x - b * output, a * output + b * x)
        if i == STEPS - 1:
            x = x0
            break
        now, after = kept[t], kept[times[i + 1]]
        sigma = eta * math.sqrt((1 - after) / (1 - now)) * math.sqrt(1 - now / after)
        x = math.sqrt(after) * x0 + math.sqrt(max(0.0, 1 - after - sigma**2)) * e
        # New at every step: with the same noise the added parts would be copies of one another.
        x = x + sigma * noise.normal(f"sample step {i}", POSITIONS, PAPER_SHAPE)
    found = sample_latents(network, process, noise, POSITIONS, PAPER_SHAPE, STEPS, "ddpm" if eta else "ddim")
    torch.testing.assert_close(found, x, rtol=2e-3, atol=2e-3)


class ByLabel(nn.Module):
    """Predicts a number that depends on the label alone, so that each use of a label can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, noisy: Tensor, times: Tensor, class_labels: Tensor) -> Tensor:
        self.sizes.append(len(noisy))
        return (10.0 ** class_labels.float()).view(-1, 1, 1, 1, 1).expand_as(noisy)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 7.5])
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


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m", "heun"])
@pytest.mark.parametrize("scale", [3.0, 1.0, 0.0])
def test_predictions_are_counted_as_the_network_makes_them_and_each_step_is_counted_once(tiny_values, sampler, scale):
    tiny_values["ldm"] |= {
        "conditioning": {"type": "class", "num_classes": 3},
        "scheduler": {"type": "rflow" if sampler == "heun" else "ddpm"},
        "sampling": {"sampler": sampler, "num_inference_steps": 7, "guidance_scale": scale},
    }
    settings, network, steps = Settings.model_validate(tiny_values), ByLabel(), []
    codec = SimpleNamespace(precision=SimpleNamespace(device=CPU), decode=lambda latent: latent)
    sampler = VolumeSampler(network, codec, settings, Normalisation.uniform(3))  # type: ignore[arg-type]
    next(sampler.draw([0], on_step=lambda: steps.append(1)))
    assert num_predictions(settings.ldm) == network.sizes
    assert len(steps) == 7


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


def draw(step: LatentDiffusionStep, positions, batch_size: int, seed: int = 5, **options) -> Tensor:
    sampler = VolumeSampler(step.unet, step.codec, step.settings, step.normalisation, seed, batch_size)
    return torch.stack(list(sampler.draw(positions, **options)))


def test_a_sample_is_a_function_of_seed_and_position_whatever_the_batch_size(tiny_values):
    step = ldm_step(tiny_values, sampling={"sampler": "ddpm"})  # which draws noise at every step
    one_by_one = draw(step, range(3), 1)
    assert one_by_one.shape == (3, 1, 16, 16, 16)
    torch.testing.assert_close(draw(step, range(3), 2), one_by_one, rtol=0, atol=1e-5)
    torch.testing.assert_close(draw(step, [2, 1], 2), one_by_one[[2, 1]], rtol=0, atol=1e-5)
    assert (draw(step, range(1), 1, seed=6) - one_by_one[:1]).abs().mean() > 1e-3
    assert (one_by_one[0] - one_by_one[1]).abs().mean() > 1e-3
