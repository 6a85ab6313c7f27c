"""The Haar start: the encoder's first values are the Haar transform, in both implementations and for all strides."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

from models import build_autoencoder, start_as_haar_transform
from models.haar_start import DIFFERENCE_GAIN, REST, SIGMA, STEP
from settings.autoencoder import AutoencoderSettings


def networks(**values):
    """An autoencoder with random weights, and the same one after the start."""
    s = AutoencoderSettings.model_validate(
        {"num_channels": (16, 32), "num_res_blocks": (0, 1), "attention_levels": (False, False), "latent_channels": 4}
        | values
    )
    torch.manual_seed(0)
    plain = build_autoencoder(s).eval()
    started = copy.deepcopy(plain)
    start_as_haar_transform(started, s.in_channels, s.level_strides)
    return plain, started


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def encoded(network, volume, num_blocks):
    """The first of the volumes after the first blocks of the encoder."""
    for block in network.encoder.blocks[:num_blocks]:
        volume = block(volume)
    return volume[0].numpy()


def haar(volume: np.ndarray, along: tuple[int, ...], axes: tuple[int, ...] = (0, 1, 2)) -> np.ndarray:
    """Means over blocks of two along each of the axes, or half the differences along those in `along`."""
    for axis in axes:
        first, second = (np.take(volume, range(start, volume.shape[axis], 2), axis) for start in (0, 1))
        volume = (second - first) / 2 if axis in along else (first + second) / 2
    return volume


SUBSETS = [axes for size in range(4) for axes in itertools.combinations(range(3), size)]


@pytest.mark.parametrize(("implementation", "in_channels"), [("lean", 1), ("lean", 2), ("monai", 2)])
def test_the_first_level_is_the_haar_transform_of_each_channel_means_first(implementation, in_channels):
    _, network = networks(implementation=implementation, in_channels=in_channels)
    volume = random(1, in_channels, 8, 6, 4)
    found = encoded(network, volume, 2)
    for channel in range(8 * in_channels):
        along = SUBSETS[channel // in_channels]
        expected = haar(volume[0, channel % in_channels].numpy(), along) * (DIFFERENCE_GAIN if along else 1)
        np.testing.assert_allclose(found[channel], expected, atol=1e-5)


def test_later_levels_transform_the_means_of_the_level_above_along_the_axes_that_shrink():
    levels = {"num_channels": (16, 16, 16), "attention_levels": (False,) * 3, "num_res_blocks": (0, 0, 1)}
    _, network = networks(**levels, strides=((2, 2, 2), (2, 2, 1)))
    volume = random(1, 1, 8, 8, 8)
    expected = haar(haar(volume[0, 0].numpy(), ()), (0,), axes=(0, 1)) * DIFFERENCE_GAIN
    np.testing.assert_allclose(encoded(network, volume, 3)[1], expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["lean", "monai"])
@pytest.mark.parametrize(
    ("shape", "least"),
    [({}, 0.9), ({"num_channels": (4, 4), "norm_num_groups": 4, "latent_channels": 6}, 0.8)],
    ids=["all of it", "as much as the last level has channels"],
)
def test_the_latent_starts_as_mean_and_differences_with_a_small_sigma(implementation, shape, least):
    _, network = networks(implementation=implementation, **shape)
    volume = random(1, 1, 16, 16, 16) * 2 - 1
    with torch.no_grad():
        mean, sigma = network.encode(volume)
    torch.testing.assert_close(sigma, torch.full_like(sigma, SIGMA), rtol=1e-5, atol=0)
    for channel, along in enumerate([(), (0,), (1,), (2,)]):
        wanted = haar(volume[0, 0].numpy(), along).ravel()
        assert np.corrcoef(mean[0, channel].numpy().ravel(), wanted)[0, 1] > least, f"channel {channel}"


def test_residual_blocks_start_as_their_shortcuts():
    _, network = networks(num_res_blocks=1)
    x = random(1, 32, 4, 4, 4)
    # From 32 to 16 channels: the first 16 of them.
    torch.testing.assert_close(network.decoder.blocks[3](x), x[:, :16])
    torch.testing.assert_close(network.decoder.blocks[1](x), x)


def test_the_decoder_pulls_the_halves_of_a_block_apart_along_the_axis_of_the_difference():
    plain, network = networks()
    before, after = (n.decoder.blocks[2].postconv.conv.weight.detach() for n in (plain, network))
    added = after - REST * before
    for channel, kernels in enumerate(added):
        expected = torch.zeros(32, 3, 3, 3)
        axis = channel % 4 - 1  # of the difference; the first of four channels is the mean
        line = torch.tensor([0.0, 1.0, 0.0] if axis < 0 else [STEP, 0.0, -STEP])
        expected[channel].transpose(0, max(axis, 0))[:, 1, 1] = line
        torch.testing.assert_close(kernels, expected, atol=1e-6, rtol=0)


def test_every_weight_gets_a_gradient():
    _, network = networks()
    volume = random(2, 1, 8, 8, 8)
    for _ in range(2):
        # The first step moves the second convolutions of residual blocks away from zero; then the rest of them learns.
        reconstruction, mean, sigma = network(volume)
        network.zero_grad()
        ((reconstruction - volume).square().mean() + 0.1 * (mean.square() + sigma).mean()).backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad
    assert all(parameter.grad.abs().max() > 0 for parameter in network.parameters())
