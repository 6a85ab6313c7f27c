"""Noise with the texture of the latents: as strong at each position and as alike at neighbouring ones."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from diffusion.normalisation import NoiseShape, Statistics, Texture
from runtime.processes import Process
from tests.diffusion.test_normalisation import CPU, SHAPE, moments, normalisation_of, settings_of


def test_texture_multiplies_by_the_product_of_its_roots():
    """Against the matrix of all positions of a channel, which is the Kronecker product of those of the axes."""
    torch.manual_seed(0)
    roots = tuple(torch.randn(3, n, n).double() for n in SHAPE[1:])
    texture = Texture(torch.rand(SHAPE).double(), tuple(root + root.mT for root in roots))
    noise = torch.randn(2, *SHAPE).double()
    for sample in noise:
        for channel, found in enumerate(texture(sample)):
            depth, height, width = (root[channel] for root in texture.roots)
            matrix = torch.kron(depth, torch.kron(height, width))
            wanted = (matrix @ sample[channel].flatten()).view(SHAPE[1:]) * texture.strength[channel]
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    directions = torch.linalg.qr(torch.randn(72, 2).double())[0].T
    shape = NoiseShape(directions.reshape(2, *SHAPE), torch.tensor([5.0, 3.0]).double(), texture)
    one = noise[:1].flatten(1)
    rest = texture((one - one @ directions.T @ directions).view(SHAPE)).flatten()
    wanted = rest + ((one @ directions.T) * shape.deviations @ directions)[0]
    torch.testing.assert_close(shape(noise)[0].flatten(), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(shape(noise)[1], shape(noise[1:])[0])


@pytest.mark.parametrize("components", [0, 3])
def test_noise_with_texture_varies_like_latents_that_are_smooth_and_stronger_in_places(components):
    """Latents with known correlations along each axis, known strength, and draws around them."""
    generator = torch.Generator().manual_seed(0)
    alike = [0.9, 0.5, 0.7]
    wanted = [a ** (torch.arange(n)[:, None] - torch.arange(n)).abs() for a, n in zip(alike, SHAPE[1:], strict=True)]
    roots = tuple(torch.linalg.cholesky(matrix).T.repeat(3, 1, 1) for matrix in wanted)
    strength = (0.5 + torch.arange(4.0)).view(1, 1, 4, 1).expand(SHAPE)
    white = torch.randn(400, *SHAPE, generator=generator)
    mean = torch.stack([Texture(strength, roots)(sample) for sample in white])
    large = torch.randn(3, *SHAPE, generator=generator)
    mean = mean + components * torch.einsum("nk,k...->n...", torch.randn(400, 3, generator=generator), large)
    sigma = 0.2 * strength.expand_as(mean)
    normalisation = normalisation_of(mean, sigma, "channel", components, "latents")
    assert normalisation.noise_shape is not None
    noise = normalisation.shaped(torch.randn(4000, *SHAPE, generator=generator))
    drawn = normalisation.apply(mean + sigma * torch.randn(mean.shape, generator=generator))
    drawn = drawn - drawn.mean(dim=0)
    of_noise, of_latents = (values.var(dim=0) for values in (noise, drawn))
    # The strength is smoothed over three positions, so by line only roughly.
    assert (of_noise / of_latents).log().abs().mean() < 0.35
    for axis in (2, 3, 4):
        near = [values.movedim(axis, -1) for values in (noise, drawn)]
        found = [float((v[..., 1:] * v[..., :-1]).mean() / v.square().mean()) for v in near]
        assert abs(found[0] - found[1]) < 0.12, (axis, found)


def test_textured_noise_has_the_strength_of_the_latents_also_where_most_positions_are_empty():
    mean, sigma = moments(60)
    mean[:, :, :, 1:] = 0
    normalisation = normalisation_of(mean, 1e-4 * sigma, "channel", 0, "latents")
    assert normalisation.noise_shape is not None
    assert normalisation.noise_shape.texture is not None
    # The images of all unit vectors are the matrix that shapes noise.
    variance = normalisation.shaped(torch.eye(72).view(72, *SHAPE)).square().sum(dim=0)
    torch.testing.assert_close(variance, normalisation.noise_shape.texture.strength.square(), rtol=1e-4, atol=0)
    assert (variance.amin(dim=(1, 2, 3)) / variance.mean(dim=(1, 2, 3))).min() > 0.009
    of_latents = normalisation.apply(mean).var(dim=0)
    torch.testing.assert_close(variance.mean(), of_latents.mean(), rtol=0.1, atol=0)


def test_one_volume_has_white_noise_of_least_strength_where_a_texture_is_wanted():
    mean, sigma = moments(1)
    shape = normalisation_of(mean, 0 * sigma, "channel", 3, "latents").noise_shape
    assert shape is not None
    assert shape.texture is not None
    assert torch.allclose(shape.texture.strength, torch.tensor(0.01))
    for root in shape.texture.roots:
        torch.testing.assert_close(root, torch.eye(root.shape[1]).expand_as(root))


class OneOfTwo(Process):
    """The first of two processes, which read all latents; summing in place leaves the sum in the other one too."""

    summed: ClassVar[list[torch.Tensor]] = []

    def sum(self, values):
        if any(values is before for before in self.summed):
            return values.mul_(2)
        self.summed.append(values)
        return values


@pytest.mark.parametrize("kind", ["scale", "position"])
def test_several_processes_have_the_same_examples_before_and_after_the_normalisation(kind):
    found = []
    for process in (CPU, OneOfTwo(CPU.device, world_size=2)):
        statistics = Statistics(settings_of(kind, 3, "latents"), 6)
        for index, pair in enumerate(zip(*moments(6), strict=True)):
            statistics.add(index, pair)
        normalisation = statistics.normalisation(0.5, process)
        numbers, examples = statistics.examples_in(normalisation, process)
        assert numbers == list(range(6))
        found.append((examples, *statistics.examples_in(normalisation, process)[1:], normalisation.shaped(examples)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
