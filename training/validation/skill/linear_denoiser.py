"""The best linear denoiser of a set of latents: the opponent that a trained network has to beat.

A Gaussian with the mean and the covariance of the training latents has a denoiser in closed form. Few examples of large
latents say little of their covariance; there a filter that is the same at every position is better. A network whose
error is not below both has learned nothing that a linear model does not say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

SHRINKAGES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
"""Shares by which the sample covariance is shrunk towards a multiple of the identity."""

FILL_SHRINKAGES = SHRINKAGES[3:]
"""Those that are tried for holes."""

CONDITION_VARIANCES = (0.01, 0.1, 1.0, math.inf)
"""Variances of what a condition's features leave unexplained; infinite: they are ignored."""

SMALLEST_SHARE = 1e-10
"""Numbers whose variance is less than this share of their mean square are constant but for rounding."""

MEAN_SHARES = (0.0, 0.5, 1.0)
"""How much of the mean at each position the stationary filter subtracts; few examples say little of it."""


class StationaryFilter:
    """The Wiener filter of latents (N, C, D, H, W): linear, the same at every position, over all channels together."""

    def __init__(self, latents: Tensor) -> None:
        self.mean = latents.mean(dim=0)
        # The mean power (D, H, W, C, C) at each spatial frequency, between all channels, and that of the mean.
        self.mean_power = _power(self.mean)
        self.power = torch.zeros_like(self.mean_power)
        for latent in latents:
            self.power += _power(latent) / len(latents)

    def denoise(self, noisy: Tensor, signal: float, level: float, share: float) -> Tensor:
        """Return the expected clean latents of noisy ones, both (B, C, D, H, W)."""
        # E |z - s m|^2 = E |z|^2 - (2 s - s^2) |m|^2 for examples z with mean m.
        mean, power = share * self.mean, self.power - share * (2 - share) * self.mean_power
        eye = torch.eye(power.shape[-1], dtype=power.dtype, device=power.device)
        inverse = torch.linalg.inv(signal**2 * power + level**2 * eye)
        waves = signal * power @ inverse @ _waves(noisy - signal * mean)
        restored = torch.fft.ifftn(waves.squeeze(-1).movedim(-1, -4), dim=(-3, -2, -1), norm="ortho").real
        return mean + restored.to(noisy.dtype)


def _waves(latents: Tensor) -> Tensor:
    """Return the Fourier coefficients (..., D, H, W, C, 1) of latents (..., C, D, H, W)."""
    return torch.fft.fftn(latents.double(), dim=(-3, -2, -1), norm="ortho").movedim(-4, -1).unsqueeze(-1)


def _power(latent: Tensor) -> Tensor:
    waves = _waves(latent)
    return waves @ waves.mH


def _scale(features: Tensor) -> float:
    """Return what scales features (N, F) to a total variance of 1; 0 if they are constant but for rounding."""
    features = features.double()
    total = float((features - features.mean(dim=0)).square().sum())
    is_constant = total <= SMALLEST_SHARE * float(features.square().sum())
    return 0.0 if is_constant else math.sqrt((len(features) - 1) / total)


class LinearDenoiser:
    """Predicts clean latents from noisy ones and, if there are any, from the features of their conditions.

    The model: latent = mean + sqrt(1 - s) * sum_i w_i * (example_i - mean) + r, where w is Gaussian, so the sum has
    the sample covariance, and r is white with the share s of the mean variance. The features of a condition, of which
    each kind is scaled to a total variance of 1, are the same combination w of the examples' features plus white noise
    of the given variance. Everything is solved in the space of w, which has one dimension per example.
    """

    def __init__(self, latents: Tensor, features: Sequence[Tensor] = ()) -> None:
        """Fit to N latents (N, ...) and features of their conditions, (N, F) of each kind."""
        assert len(latents) > 1, f"a covariance needs at least two latents, not {len(latents)}"
        self.shape, flat = latents.shape[1:], latents.flatten(1)
        self.mean = flat.mean(dim=0)
        self.centred = flat - self.mean
        self.gram = (self.centred @ self.centred.T).double()
        self.variance = float(self.gram.trace()) / (len(flat) - 1) / flat.shape[1]
        self.stationary = StationaryFilter(latents)
        self.feature_means = [part.mean(dim=0) for part in features]
        self.feature_scales = [_scale(part) for part in features]
        self.has_features = any(self.feature_scales)
        self._bases: dict[float, tuple[Tensor, Tensor]] = {}
        if self.has_features:
            self.feature_centred = self._scaled(features)
            self.feature_gram = (self.feature_centred @ self.feature_centred.T).double()

    def _scaled(self, features: Sequence[Tensor]) -> Tensor:
        """Return all kinds of features, each centred and scaled as the examples' are, as one row per latent."""
        parts = zip(features, self.feature_means, self.feature_scales, strict=True)
        return torch.cat([(part - mean) * scale for part, mean, scale in parts], dim=1)

    @property
    def choices(self) -> list[tuple[float, float]]:
        """Return the pairs of shrinkage and unexplained variance that `errors` tries first."""
        return list(itertools.product(SHRINKAGES, CONDITION_VARIANCES if self.has_features else [math.inf]))

    def errors(
        self,
        clean: Tensor,
        noise: Tensor,
        signal: float,
        level: float,
        features: Sequence[Tensor] = (),
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum over the batch of each latent's mean squared error, for `choices` and `MEAN_SHARES`.

        With `weights` (B, 1, ...) of the errors, a latent is known where they are 0; then the errors of `fill` follow.
        """
        noisy = signal * clean + level * noise
        flat, target = noisy.flatten(1), clean.flatten(1)
        estimates = [*self.denoise(flat, signal, level, self.choices, features)]
        estimates += [self.stationary.denoise(noisy, signal, level, share).flatten(1) for share in MEAN_SHARES]
        each = torch.ones(()) if weights is None else weights.expand_as(clean).flatten(1)
        if weights is not None:
            estimates += [*self.fill(target, flat, signal, level, each == 0)]
        return torch.stack([((found - target).square() * each).mean(dim=1).sum().double() for found in estimates])

    def fill(self, clean: Tensor, noisy: Tensor, signal: float, level: float, known: Tensor) -> Tensor:
        """Return the expected clean latents of noisy ones (B, D) whose `known` values are given, (shrinkages, B, D)."""
        results = clean.repeat(len(FILL_SHRINKAGES), 1, 1)
        prior = (len(self.gram) - 1) * torch.eye(len(self.gram), dtype=torch.float64)
        for row, hole in enumerate(~known):
            examples, observed = self.centred[:, hole], (noisy[row] - signal * self.mean)[hole]
            gram, along = (examples @ examples.T).double(), (examples @ observed).double()
            along_known = (self.centred[:, ~hole] @ (clean[row] - self.mean)[~hole]).double()
            for place, shrinkage in enumerate(FILL_SHRINKAGES):
                rest, kept = shrinkage * self.variance, math.sqrt(1 - shrinkage)
                variance = signal**2 * rest + level**2
                precision = prior + kept**2 * ((self.gram - gram) / rest + signal**2 / variance * gram)
                right = kept * (along_known / rest + signal / variance * along)
                expected = kept * torch.linalg.solve(precision, right).to(noisy.dtype) @ examples
                expected += signal * rest / variance * (observed - signal * expected)
                results[place, row, hole] = self.mean[hole] + expected
        return results

    def num_errors(self, has_holes: bool) -> int:
        """Return how many errors `errors` returns."""
        return len(self.choices) + len(MEAN_SHARES) + has_holes * len(FILL_SHRINKAGES)

    def denoise(
        self,
        noisy: Tensor,
        signal: float,
        level: float,
        choices: Sequence[tuple[float, float]],
        features: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the expected clean latents of noisy ones (B, D) for each choice, (choices, B, D)."""
        observed = noisy - signal * self.mean
        along_examples = (observed @ self.centred.T).double()
        found, shares = [], []
        for shrinkage, unexplained in choices:
            rest, kept = shrinkage * self.variance, math.sqrt(1 - shrinkage)
            variance = signal**2 * rest + level**2
            # Normal equations of w given both observations, in a basis in which their matrix is diagonal.
            right = signal * kept / variance * along_examples
            if self.has_features and math.isfinite(unexplained):
                right = right + (self._scaled(features) @ self.feature_centred.T).double() / unexplained
            basis, values = self._basis(unexplained)
            found.append(kept * (right @ basis / (1 + (signal * kept) ** 2 / variance * values) @ basis.T))
            shares.append(signal * rest / variance)
        # All choices in one product, because reading the examples takes most of the time.
        expected = (torch.cat(found).to(noisy.dtype) @ self.centred).view(len(choices), *noisy.shape)
        share = torch.tensor(shares, dtype=noisy.dtype, device=noisy.device).view(-1, 1, 1)
        return self.mean + expected + share * (observed - signal * expected)

    def _basis(self, unexplained: float) -> tuple[Tensor, Tensor]:
        """Return W and e with W^T P W = 1 and W^T G W = diag(e), found once for each unexplained variance.

        P is the precision of the prior of w, N - 1, plus that of the features; G is the examples' Gram matrix.
        """
        if unexplained not in self._bases:
            precision = (len(self.gram) - 1) * torch.eye(len(self.gram), dtype=torch.float64, device=self.gram.device)
            if self.has_features and math.isfinite(unexplained):
                precision = precision + self.feature_gram / unexplained
            lower = torch.linalg.cholesky(precision)
            half = torch.linalg.solve_triangular(lower, self.gram, upper=False)
            values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(lower, half.T, upper=False))
            basis = torch.linalg.solve_triangular(lower.T, vectors, upper=True)
            self._bases[unexplained] = basis, values.clamp_min(0)
        return self._bases[unexplained]

    def draw(self, white: Tensor, weights: Tensor) -> Tensor:
        """Return latents drawn from the Gaussian, with the smallest shrinkage, from white noise (B, ...) and (B, N)."""
        shrinkage = SHRINKAGES[0]
        rest = math.sqrt(shrinkage * self.variance) * white.flatten(1)
        combined = weights @ self.centred * math.sqrt((1 - shrinkage) / (len(self.centred) - 1))
        return (self.mean + combined + rest).view(len(white), *self.shape)
