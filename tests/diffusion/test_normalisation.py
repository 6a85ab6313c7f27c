"""Normalisation of latents: by channel, through training, decoding and files."""

from __future__ import annotations

import pytest
import torch

from data import prepare_volumes
from diffusion.latents import prepare_latents
from diffusion.normalisation import Normalisation, Statistics
from models.volume_codec import frozen_codec
from runtime.processes import Process
from settings import CheckpointError, Settings

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


def test_the_normalisation_and_the_mean_latent_are_of_the_training_volumes(tiny_values):
    tiny_values["ldm"]["latents"] = {"cache": "memory"}
    settings = Settings.model_validate(tiny_values)
    codec = frozen_codec(settings, CPU, load_weights=False)
    latents = prepare_latents(codec, prepare_volumes(settings.data, settings.seed, 1), settings, CPU)
    assert latents.read is not None
    training = torch.stack([latents.read(index, 0) for index in range(len(latents.volumes.train))])
    for name, expected in statistics_of(training).normalisation(CPU).content().items():
        assert torch.equal(latents.normalisation.content()[name], expected)
    mean = latents.normalisation.apply(training.mean(dim=0))
    torch.testing.assert_close(latents.mean_map, mean, rtol=1e-4, atol=1e-5)
