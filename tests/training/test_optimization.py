"""Learning rate, averaged weights, and noise that belongs to samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from settings import TrainingSettings
from training.optimization import AveragedWeights, learning_rate_factor
from training.randomness import SampleNoise, derive_seed


def test_learning_rate_rises_over_the_warm_up_and_falls_as_a_cosine():
    settings = TrainingSettings(max_steps=110, warmup_steps=10, learning_rate_decay="cosine")
    factors = [learning_rate_factor(step, settings) for step in range(110)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == pytest.approx(1.0)
    assert factors[60] == pytest.approx(0.5)
    assert factors[-1] < 0.001
    constant = TrainingSettings(max_steps=110, warmup_steps=0)
    assert learning_rate_factor(100, constant) == 1.0


def test_averaged_weights_follow_and_can_be_swapped_in():
    network = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(network.weight)
    average = AveragedWeights(network, decay=0.5)
    with torch.no_grad():
        network.weight.fill_(1.0)
    average.update(step=100)
    with average.swapped_in():
        torch.testing.assert_close(network.weight.detach(), torch.full((1, 2), 0.5))
    torch.testing.assert_close(network.weight.detach(), torch.ones(1, 2))


def test_noise_of_a_sample_does_not_depend_on_its_batch():
    noise = SampleNoise(seed=1, device=torch.device("cpu"))
    together = noise.normal("latent", (4, 5), (3, 2))
    alone = noise.normal("latent", (5,), (3, 2))
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=0)
    assert (noise.normal("other", (5,), (3, 2)) != alone).any()
    assert derive_seed(1, "latent", 5) != derive_seed(2, "latent", 5)
    uniform = noise.uniform("timestep", range(200))
    assert 0 <= float(uniform.min()) < 0.05 < 0.95 < float(uniform.max()) < 1
