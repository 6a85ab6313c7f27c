"""Normalisation of latents: by channel, through training, decoding and files."""

from __future__ import annotations

import pytest
import torch

from data import prepare_volumes
from diffusion.latents import Latents, prepare_latents
from diffusion.normalisation import Normalisation, Statistics
from models import build_autoencoder
from models.frozen_autoencoder import freeze
from models.volume_codec import VolumeCodec
from models.weight_files import load_weights, save_weights
from runtime.precision import Precision
from runtime.processes import Process
from settings import CheckpointError, Settings
from training.ldm_step import LatentDiffusionStep

CPU = Process(torch.device("cpu"))
SHAPE = (3, 2, 4, 3)
ONES = torch.ones(3, 1, 1, 1)


def example_latents(number: int, seed: int = 0) -> torch.Tensor:
    """Return latents whose channels differ in mean and size, with a pattern common to all latents."""
    generator = torch.Generator().manual_seed(seed)
    pattern = 3 * torch.randn(SHAPE, generator=generator)
    spread = torch.tensor([0.1, 1.0, 7.0]).view(3, 1, 1, 1)
    return pattern + spread * torch.randn(number, *SHAPE, generator=generator) + 10 * spread


def statistics_of(latents: torch.Tensor) -> Statistics:
    statistics = Statistics(len(latents), latents.shape[1:])
    for index, latent in enumerate(latents):
        statistics.add(index, latent)
    return statistics


def test_latents_have_mean_zero_and_variance_one_in_each_channel_and_come_back():
    latents = example_latents(50)
    normalised = statistics_of(latents).normalisation(CPU).apply(latents)
    assert normalised.mean(dim=(0, 2, 3, 4)).abs().max() < 1e-5
    torch.testing.assert_close(normalised.square().mean(dim=(0, 2, 3, 4)), torch.ones(3), rtol=1e-5, atol=1e-5)
    normalisation = statistics_of(latents).normalisation(CPU)
    torch.testing.assert_close(normalisation.undo(normalised), latents, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("constant", [2.0, 1.7])  # rounding leaves the second some variance
def test_a_channel_without_variance_is_refused_unless_it_may_be_constant(constant):
    latents = example_latents(100)
    latents[:, 1] = constant
    with pytest.raises(CheckpointError, match=r"latents is .* in channel 1, counted from 0.*; train stage 1 again"):
        statistics_of(latents).normalisation(CPU)
    found = statistics_of(latents).normalisation(CPU, may_be_constant=True)
    assert found.scale[1] == 1
    assert found.apply(latents)[:, 1].abs().max() < 1e-6
    latents[2, 0, 0, 0, 0] = torch.nan
    with pytest.raises(CheckpointError, match="latents is nan in channel 0"):
        statistics_of(latents).normalisation(CPU)


def test_a_weight_file_gives_back_the_normalisation_and_the_weights_alone(tmp_path):
    normalisation = statistics_of(example_latents(5)).normalisation(CPU)
    weights = {"conv.weight": torch.rand(2, 2)}
    save_weights(tmp_path / "ldm.safetensors", weights, {"stage": "ldm", **normalisation.content()})
    state, metadata = load_weights(tmp_path / "ldm.safetensors")
    assert state.keys() == weights.keys()
    assert metadata["stage"] == "ldm"
    found = Normalisation.stored(metadata, 3)
    assert torch.equal(found.scale, normalisation.scale)
    assert torch.equal(found.mean, normalisation.mean)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, r"latent_scale is not a tensor of \(3, 1, 1, 1\) finite values"),
        ({"latent_scale": 1.0}, "latent_scale is not a tensor"),
        ({"latent_scale": ONES}, "latent_mean is not a tensor"),
        ({"latent_scale": ONES, "latent_mean": ONES[:2]}, "latent_mean is not a tensor"),
        ({"latent_scale": torch.nan * ONES, "latent_mean": ONES}, "latent_scale is not a tensor"),
        ({"latent_scale": 0 * ONES, "latent_mean": ONES}, "not above 0"),
    ],
)
def test_what_is_not_a_normalisation_is_refused(content, reason):
    with pytest.raises(ValueError, match=reason):
        Normalisation.stored(content, 3)


def prepared(values) -> tuple[LatentDiffusionStep, Latents]:
    """Return a step and the latents of phantoms, with an autoencoder whose decoder does not forget its input's mean."""
    values["ldm"]["latents"] = {"cache": "memory"}
    values["ldm"]["scheduler"] = {"prediction": "epsilon"}
    values["ldm"]["training"]["pixel_loss"] = {"weight": 0.5}
    settings = Settings.model_validate(values)
    torch.manual_seed(0)
    autoencoder = freeze(build_autoencoder(settings.autoencoder))
    codec = VolumeCodec(autoencoder, settings.autoencoder, Precision(settings.device, CPU.device))
    latents = prepare_latents(codec, prepare_volumes(settings.data, settings.seed, 1), settings, CPU)
    return LatentDiffusionStep(settings, CPU, codec=codec, latents=latents), latents


def test_the_normalisation_is_of_the_training_volumes(tiny_values):
    _, latents = prepared(tiny_values)
    assert latents.read is not None
    training = torch.stack([latents.read(index, 0) for index in range(len(latents.volumes.train))])
    for name, expected in statistics_of(training).normalisation(CPU).content().items():
        assert torch.equal(latents.normalisation.content()[name], expected)


def test_the_pixel_loss_and_its_gradient_are_those_of_the_decoded_latents(tiny_values):
    step, _ = prepared(tiny_values)
    scale, mean = step.normalisation.scale, step.normalisation.mean
    assert step.pixel_loss is not None
    generator = torch.Generator().manual_seed(3)
    clean, predicted = (torch.randn(2, *step.settings.latent_shape, generator=generator) for _ in range(2))
    times = torch.tensor([300, 700])
    loss, gradient, _ = step._pixel_pass(predicted, clean, times, 1.0)
    leaf = predicted.clone().requires_grad_()
    signal, _ = step.noise_process.coefficients(times)
    errors = step.autoencoder.decode(leaf / scale + mean) - step.autoencoder.decode(clean / scale + mean)
    expected = (errors.square().flatten(1).mean(dim=1) * signal.flatten().square()).mean()
    (0.5 * expected).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-7)
