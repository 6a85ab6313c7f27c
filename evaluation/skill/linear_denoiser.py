"""The best linear denoiser of a set of latents: the opponent that a trained network has to beat.

A Gaussian with the mean and the covariance of the training latents has a denoiser in closed form. Few examples of large
latents say little of their covariance; there a filter that is the same at every position is better. A network whose
error is not below both has learned nothing that a linear model does not say.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

SHRINKAGES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
"""Shares by which the sample covariance is shrunk towards a multiple of the identity."""

CONDITION_VARIANCES = (0.01, 0.1, 1.0, math.inf)
"""Variances of what a condition's features, scaled to variance 1, leave unexplained; infinite: they are ignored."""


MEAN_SHARES = (0.0, 0.5, 1.0)
"""How much of the mean at each position the stationary filter subtracts; few examples say little of it."""


class StationaryFilter:
    """The Wiener filter of latents (N, C, D, H, W): linear, the same at every position, over all channels together."""

    def __init__(self, latents: Tensor) -> None:
        self.mean = latents.mean(dim=0)
        self.spectra = {share: self._spectrum(latents, share) for share in MEAN_SHARES}

    def _spectrum(self, latents: Tensor, share: float) -> Tensor:
        """Return the mean power (D, H, W, C, C) at each spatial frequency, between all channels."""
        total = torch.zeros((), device=latents.device)
        for latent in latents:
            waves = _waves(latent - share * self.mean)
            total = total + waves @ waves.mH
        return total / len(latents)

    def denoise(self, noisy: Tensor, signal: float, level: float, share: float) -> Tensor:
        """Return the expected clean latents of noisy ones, both (B, C, D, H, W)."""
        mean, power = share * self.mean, self.spectra[share]
        eye = torch.eye(power.shape[-1], dtype=power.dtype, device=power.device)
        inverse = torch.linalg.inv(signal**2 * power + level**2 * eye)
        waves = signal * power @ inverse @ _waves(noisy - signal * mean)
        restored = torch.fft.ifftn(waves.squeeze(-1).movedim(-1, -4), dim=(-3, -2, -1), norm="ortho").real
        return mean + restored.to(noisy.dtype)


def _waves(latents: Tensor) -> Tensor:
    """Return the Fourier coefficients (..., D, H, W, C, 1) of latents (..., C, D, H, W)."""
    return torch.fft.fftn(latents.double(), dim=(-3, -2, -1), norm="ortho").movedim(-4, -1).unsqueeze(-1)


class LinearDenoiser:
    """Predicts clean latents from noisy ones and, if there are any, from the features of their conditions.

    The model: latent = mean + sqrt(1 - s) * sum_i w_i * (example_i - mean) + r, where w is Gaussian, so the sum has
    the sample covariance, and r is white with the share s of the mean variance. The features of a condition are the
    same combination w of the examples' features plus white noise of the given variance. Everything is solved in the
    space of w, which has one dimension per example.
    """

    def __init__(self, latents: Tensor, features: Tensor | None = None) -> None:
        """Fit to N latents (N, ...) and features (N, F) of their conditions."""
        assert len(latents) > 1, f"a covariance needs at least two latents, not {len(latents)}"
        self.shape, flat = latents.shape[1:], latents.flatten(1)
        self.mean = flat.mean(dim=0)
        self.centred = flat - self.mean
        self.gram = (self.centred @ self.centred.T).double()
        self.variance = float(self.gram.trace()) / (len(flat) - 1) / flat.shape[1]
        self.stationary = StationaryFilter(latents)
        self.has_features = features is not None and features.shape[1] > 0
        if self.has_features:
            assert features is not None, "features were given"
            self.feature_mean = features.mean(dim=0)
            rest = features - self.feature_mean
            self.feature_scale = 1 / max(1e-12, float(rest.square().sum(dim=0).mean() / (len(flat) - 1)) ** 0.5)
            self.feature_centred = rest * self.feature_scale
            self.feature_gram = (self.feature_centred @ self.feature_centred.T).double()

    @property
    def choices(self) -> list[tuple[float, float]]:
        """Return the pairs of shrinkage and unexplained variance that `errors` tries first."""
        return list(itertools.product(SHRINKAGES, CONDITION_VARIANCES if self.has_features else [math.inf]))

    def errors(
        self, clean: Tensor, noise: Tensor, signal: float, level: float, features: Tensor | None = None
    ) -> Tensor:
        """Return the sum over the batch of each latent's mean squared error, for `choices` and `MEAN_SHARES`."""
        noisy = signal * clean + level * noise
        flat = noisy.flatten(1)
        estimates = [self.denoise(flat, signal, level, *choice, features) for choice in self.choices]
        estimates += [self.stationary.denoise(noisy, signal, level, share).flatten(1) for share in MEAN_SHARES]
        target = clean.flatten(1)
        return torch.stack([(estimate - target).square().mean(dim=1).sum().double() for estimate in estimates])

    @property
    def num_errors(self) -> int:
        """Return how many errors `errors` returns."""
        return len(self.choices) + len(MEAN_SHARES)

    def denoise(
        self,
        noisy: Tensor,
        signal: float,
        level: float,
        shrinkage: float,
        unexplained: float = math.inf,
        features: Tensor | None = None,
    ) -> Tensor:
        """Return the expected clean latents (B, D) of noisy ones (B, D)."""
        rest, kept = shrinkage * self.variance, math.sqrt(1 - shrinkage)
        observed = noisy - signal * self.mean
        variance = signal**2 * rest + level**2
        # Normal equations of w given both observations; its prior precision is N - 1.
        matrix = (signal * kept) ** 2 / variance * self.gram
        right = signal * kept / variance * (observed @ self.centred.T).double()
        if self.has_features and math.isfinite(unexplained):
            assert features is not None, "the denoiser was fitted with features"
            weight = 1 / (unexplained * self.feature_centred.shape[1])
            told = (features - self.feature_mean) * self.feature_scale
            matrix = matrix + weight * self.feature_gram
            right = right + weight * (told @ self.feature_centred.T).double()
        matrix = matrix + (len(matrix) - 1) * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        weights = torch.linalg.solve(matrix, right.T).T.to(noisy.dtype)
        expected = kept * (weights @ self.centred)
        return self.mean + expected + signal * rest / variance * (observed - signal * expected)

    def draw(self, white: Tensor, weights: Tensor) -> Tensor:
        """Return latents drawn from the Gaussian, with the smallest shrinkage, from white noise (B, ...) and (B, N)."""
        shrinkage = SHRINKAGES[0]
        rest = math.sqrt(shrinkage * self.variance) * white.flatten(1)
        combined = weights @ self.centred * math.sqrt((1 - shrinkage) / (len(self.centred) - 1))
        return (self.mean + combined + rest).view(len(white), *self.shape)
