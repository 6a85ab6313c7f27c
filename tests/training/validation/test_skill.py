"""The linear denoiser is the best linear one, and skill compares a network with it."""

from __future__ import annotations

import math

import pytest
import torch

from training.validation.skill import FILL_SHRINKAGES, MEAN_SHARES, SHRINKAGES, LinearDenoiser, StationaryFilter

SHAPE = (2, 3, 2, 2)


def examples(number: int, seed: int = 0) -> torch.Tensor:
    """Latents with a few strong patterns over white noise, and a mean."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(4, 24, generator=torch.Generator().manual_seed(99), dtype=torch.float64) * 2
    weights = torch.randn(number, 4, generator=generator, dtype=torch.float64)
    rest = 0.3 * torch.randn(number, 24, generator=generator, dtype=torch.float64)
    return (1 + weights @ patterns + rest).view(number, *SHAPE)


@pytest.mark.parametrize("shrinkage", [0.003, 0.3])
def test_the_denoiser_is_the_conditional_mean_of_a_gaussian_with_the_shrunk_covariance(shrinkage):
    latents, signal, level = examples(9), 0.6, 0.8
    flat = latents.flatten(1)
    covariance = torch.cov(flat.T)
    covariance = (1 - shrinkage) * covariance + shrinkage * covariance.trace() / 24 * torch.eye(24, dtype=flat.dtype)
    noisy = torch.randn(5, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inverse = torch.linalg.inv(signal**2 * covariance + level**2 * torch.eye(24, dtype=flat.dtype))
    mean = flat.mean(dim=0)
    expected = mean + signal * (noisy - signal * mean) @ inverse @ covariance
    found = LinearDenoiser(latents).denoise(noisy, signal, level, [(0.9, math.inf), (shrinkage, math.inf)])[1]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_with_features_it_is_the_conditional_mean_of_the_joint_gaussian():
    latents, signal, level, shrinkage, unexplained = examples(9), 0.3, 0.95, 0.1, 0.5
    features = torch.randn(9, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 3
    flat, number = latents.flatten(1), 9
    centred, scaled_features = flat - flat.mean(dim=0), features - features.mean(dim=0)
    scaled_features = scaled_features / (scaled_features.square().sum() / (number - 1)).sqrt()
    both = torch.cat([math.sqrt(1 - shrinkage) * centred, scaled_features], dim=1)
    joint = both.T @ both / (number - 1)
    rest = shrinkage * centred.square().sum() / (number - 1) / 24
    clean = joint[:24, :24] + rest * torch.eye(24, dtype=flat.dtype)
    observed = torch.zeros(30, 30, dtype=flat.dtype)
    observed[:24, :24] = signal**2 * clean + level**2 * torch.eye(24, dtype=flat.dtype)
    observed[24:, 24:] = joint[24:, 24:] + unexplained * torch.eye(6, dtype=flat.dtype)
    observed[:24, 24:] = signal * joint[:24, 24:]
    observed[24:, :24] = observed[:24, 24:].T
    across = torch.cat([signal * clean, joint[:24, 24:]], dim=1)
    generator = torch.Generator().manual_seed(3)
    noisy = torch.randn(4, 24, generator=generator, dtype=torch.float64)
    new = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    denoiser = LinearDenoiser(latents, [features])
    scaled = (new - features.mean(dim=0)) * denoiser.feature_scales[0]
    right = torch.cat([noisy - signal * flat.mean(dim=0), scaled], dim=1)
    expected = flat.mean(dim=0) + right @ torch.linalg.inv(observed) @ across.T
    found = denoiser.denoise(noisy, signal, level, [(shrinkage, unexplained), (0.9, 1.0)], [new])[0]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("level", [0.6, 1 - 1e-9])
def test_a_hole_is_filled_by_the_gaussian_given_what_is_known_and_only_errors_in_it_count(level):
    signal, shrinkage = math.sqrt(1 - level**2), FILL_SHRINKAGES[1]
    latents, clean = examples(30), examples(2, seed=5)
    denoiser, weights = LinearDenoiser(latents), torch.zeros(2, 1, *clean.shape[2:], dtype=torch.float64)
    weights[0, :, :2], weights[1, :, 1:, :2] = 3.0, 2.0
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    flat, hole = latents.flatten(1), weights.expand_as(clean).flatten(1) > 0
    noisy = (signal * clean + level * noise).flatten(1)
    found = denoiser.fill(clean.flatten(1), noisy, signal, level, ~hole)[1]
    covariance = flat.T.cov()
    rest = covariance.trace() / len(covariance) * torch.eye(len(covariance), dtype=torch.float64)
    covariance = (1 - shrinkage) * covariance + shrinkage * rest
    mean, errors = flat.mean(dim=0), []
    for filled, inside, target, seen in zip(found, hole, clean.flatten(1), noisy, strict=True):
        gain = torch.where(inside, signal, 1.0)
        observed = gain[:, None] * covariance * gain + torch.diag(inside * level**2)
        right = torch.linalg.solve(observed, torch.where(inside, seen, target) - gain * mean)
        expected = mean + covariance * gain @ right
        torch.testing.assert_close(filled[inside], expected[inside], rtol=1e-6, atol=1e-6)
        errors.append((expected - target)[inside].square())
    of_all = denoiser.errors(clean, noise, signal, level, weights=weights)
    assert len(of_all) == denoiser.num_errors(has_holes=True)
    expected = (3 * errors[0].sum() + 2 * errors[1].sum()) / flat.shape[1]
    torch.testing.assert_close(of_all[len(SHRINKAGES) + len(MEAN_SHARES) + 1], expected, rtol=1e-6, atol=0)


def test_draws_have_the_mean_and_the_covariance_of_the_examples():
    latents = examples(40)
    denoiser, generator = LinearDenoiser(latents), torch.Generator().manual_seed(7)
    white = torch.randn(4000, *SHAPE, generator=generator, dtype=torch.float64)
    drawn = denoiser.draw(white, torch.randn(4000, 40, generator=generator, dtype=torch.float64)).flatten(1)
    expected = torch.cov(latents.flatten(1).T)
    assert (torch.cov(drawn.T) - expected).norm() < 0.1 * expected.norm()
    assert (drawn.mean(dim=0) - latents.flatten(1).mean(dim=0)).abs().max() < 0.3


def test_the_stationary_filter_is_the_conditional_mean_under_its_own_block_circulant_covariance():
    latents, signal, level = examples(9), 0.6, 0.8
    found = StationaryFilter(latents)
    rest = latents - found.mean
    covariance = torch.zeros(24, 24, dtype=torch.float64)
    places = [(d, h, w) for d in range(3) for h in range(2) for w in range(2)]
    for shift in places:
        moved = rest.roll(shift, dims=(2, 3, 4)).flatten(1)
        covariance += moved.T @ moved / len(rest) / len(places)
    noisy = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inverse = torch.linalg.inv(signal**2 * covariance + level**2 * torch.eye(24, dtype=torch.float64))
    centred = (noisy - signal * found.mean).flatten(1)
    expected = found.mean + (signal * centred @ inverse @ covariance).view(noisy.shape)
    torch.testing.assert_close(found.denoise(noisy, signal, level, 1.0), expected, rtol=1e-9, atol=1e-9)
