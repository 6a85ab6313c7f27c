"""Skill: the network's held-out error in the clean latent, divided by that of the best linear denoiser.

Below 1 the network knows more about the volumes than their mean and covariance; one that is switched off is above.
Both see the same noisy latents and, if there are any, the same conditions.

A Gaussian with the mean and the covariance of the training latents has a denoiser in closed form. Few examples of large
latents say little of their covariance; there a filter that is the same at every position is better.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion.conditioning import error_weights
from diffusion.latents import LatentBatch, Latents
from diffusion.noise_process import NoiseProcess, predict
from diffusion.normalisation import Normalisation
from models.controlnet import binary_code
from models.volume_codec import VolumeCodec
from runtime.precision import Precision
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import Settings

NUM_LEVELS = 8
ANGLES = tuple((place + 0.5) / NUM_LEVELS * math.pi / 2 for place in range(NUM_LEVELS))
"""Noise levels between clean and noise: the angles whose tangent is the ratio of noise to signal."""

LARGEST_BATCH = 16
"""Held-out latents are denoised in batches like those of training, whose memory is enough, but of at most this many."""

MOST_EXAMPLES = 1536
MOST_EXAMPLES_WITH_HOLES = 512
MOST_VALUES = 2**26
"""The linear denoiser is fitted to at most this many training latents, and to fewer if they have more values in all.

Each hole takes equations of its own, with as many unknowns as there are examples.
"""

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


def skill_in_words(skill: float, has_holes: bool = False) -> str:
    """Return what a mean skill says about the network; as much as three digits show."""
    skill = round(skill, 3)
    error = f"skill {skill:.3f}: the network's held-out error" + (" in the hole" if has_holes else "")
    reference = "the best linear denoiser" + (" given the rest of the volume" if has_holes else "")
    if skill < 1:
        return f"{error} is on average {1 - skill:.1%} below that of {reference}"
    why = "the network is no better yet than a model of means and covariances alone; train longer, or compress more"
    if skill > 10:
        why = "it has hardly learned yet, or the volumes are so alike that a linear denoiser is nearly exact"
    return f"{error} is {skill:.3g} times that of {reference}; {why}"


@dataclass(frozen=True)
class HeldOut:
    """How held-out latents are hidden and predicted, the same for every network."""

    settings: Settings
    normalisation: Normalisation
    precision: Precision
    voxel_effects: Tensor | None = None

    @functools.cached_property
    def noise_process(self) -> NoiseProcess:
        """Return the noise process that the networks reverse."""
        return NoiseProcess(self.settings.ldm.scheduler, self.precision.device)

    @functools.cached_property
    def levels(self) -> tuple[float, ...]:
        """Return the angles of the levels that the schedule has; one of few steps may not reach all."""
        pairs = zip(ANGLES, self.noise_process.angles_near(ANGLES), strict=True)
        away = {angle: abs(angle - found) for angle, found in pairs}
        furthest = max(min(away.values()), math.pi / 4 / NUM_LEVELS)
        return tuple(angle for angle in ANGLES if away[angle] <= furthest)

    @functools.cached_property
    def times(self) -> Tensor:
        """Return the times of the levels."""
        return self.noise_process.times_by_angle(self.levels)

    def clean(self, batch: LatentBatch) -> Tensor:
        """Return the normalised means, so that the only noise is the one that is added."""
        device = self.precision.device
        return self.normalisation.to(device).apply(batch.mean.to(device))

    def noise(self, place: int, batch: LatentBatch) -> Tensor:
        """Return the noise of one level."""
        source = SampleNoise(self.settings.seed, self.precision.device)
        return source.normal(f"validation {place}", batch.positions, batch.mean.shape[1:])

    def features(self, batch: LatentBatch) -> list[Tensor]:
        """Return what each input of the U-Net says of each latent as a row of numbers, on the CPU."""
        inputs = batch.condition.unet_inputs
        classes = inputs.pop("class_labels", None)
        if classes is not None:
            number = self.settings.ldm.conditioning.num_embedded_classes
            assert number is not None, "only networks that embed classes or modalities are given any"
            inputs["class_labels"] = F.one_hot(classes, number).float()
        control = inputs.pop("control", None)
        if control is not None:
            d, h, w = batch.mean.shape[2:]
            inputs["control"] = F.adaptive_avg_pool3d(binary_code(control), (d, h, w))
        return [part.flatten(1).cpu() for part in inputs.values()]

    def weights(self, batch: LatentBatch) -> Tensor | None:
        """Return how much each error counts, on the CPU: in runs that fill holes, only what is unknown."""
        return None if self.voxel_effects is None else error_weights(batch.condition, self.voxel_effects, of_known=0.0)

    @torch.no_grad()
    def errors(self, network: nn.Module, batch: LatentBatch) -> Tensor:
        """Return the sums over the batch of the loss and of the squared error in the clean latent (2, levels)."""
        clean, condition, sums = self.clean(batch), batch.condition.to(self.precision.device), []
        weights = self.weights(batch)
        for place, time in enumerate(self.times):
            times, noise = time.expand(len(clean)), self.noise(place, batch)
            noisy = self.noise_process.add_noise(clean, noise, times)
            with self.precision.autocast():
                prediction = predict(network, noisy, times, condition, self.settings.ldm.unet.downsampling)
            target = self.noise_process.target(clean, noise, times)
            estimate, _ = self.noise_process.clean_and_noise(prediction.float(), noisy, times)
            errors = (prediction.float() - target, estimate - clean)
            sums.append(torch.stack([_mean_square(error, weights) for error in errors]))
        return torch.stack(sums, dim=1)


class Skill:
    """Measures networks on the held-out latents of a run; the linear denoiser is fitted when it is first needed."""

    def __init__(
        self, latents: Latents, codec: VolumeCodec, normalisation: Normalisation, settings: Settings, process: Process
    ) -> None:
        self.latents, self.encode, self.process = latents, codec.encode, process
        self.held_out = HeldOut(settings, normalisation, codec.precision, latents.voxel_effects)
        self.num_held_out = len(latents.volumes.val)

    def __call__(self, network: nn.Module) -> dict[str, float]:
        """Return the held-out loss and the skill, its mean and each level; empty without held-out volumes.

        A level is named by the noise's share of the variance. Without different training volumes there is no skill.
        """
        if not self.num_held_out:
            return {}
        totals = torch.zeros(2, len(self.held_out.levels), dtype=torch.float64)
        for batch in self._batches():
            totals += self.held_out.errors(network, batch).cpu()
        losses, errors = self.process.sum(totals) / self.num_held_out
        metrics = {"val_diffusion": float(losses.mean())}
        if self.linear_errors is None:
            return metrics
        skill = errors / self.linear_errors
        shares = (math.sin(angle) ** 2 for angle in self.held_out.levels)
        by_level = {f"val_skill_{share:.2f}": value for share, value in zip(shares, skill.tolist(), strict=True)}
        return {**metrics, "val_skill": float(skill.mean()), **by_level}

    @functools.cached_property
    def denoiser(self) -> LinearDenoiser | None:
        """Return the linear denoiser of the training latents, on the CPU; None if they are all the same.

        On a GPU it would need memory that training was not planned with.
        """
        number = min(len(self.latents.volumes.train), self._most_examples)
        places = (place * len(self.latents.volumes.train) // number for place in range(number))
        return self._fitted([(index, 0) for index in places])

    @functools.cached_property
    def denoisers(self) -> list[LinearDenoiser]:
        """Return `denoiser` and, of a run that augments, that of the volumes and their copies."""
        files, copies = range(len(self.latents.volumes.train)), range(self.latents.num_copies + 1)
        denoisers = [self.denoiser]
        if len(files) < self._most_examples and len(copies) > 1:
            denoisers.append(self._fitted([(i, copy) for copy in copies for i in files][: self._most_examples]))
        return [denoiser for denoiser in denoisers if denoiser is not None]

    @property
    def _most_examples(self) -> int:
        most = MOST_EXAMPLES if self.latents.voxel_effects is None else MOST_EXAMPLES_WITH_HOLES
        return min(most, max(2, MOST_VALUES // math.prod(self.held_out.settings.latent_shape)))

    def _fitted(self, examples: Sequence[tuple[int, int]]) -> LinearDenoiser | None:
        """Fit a linear denoiser to training latents, each the index of a volume and the number of its copy."""
        rows = []
        # One at a time, because latents that are not kept come from the GPU and would stay there.
        for index, copy in examples:
            latent = self.latents.latent(index, self.encode, copy)
            batch = LatentBatch(latent[None], (index,), self.latents.conditions.batch([index], [copy]))
            rows.append((self.held_out.clean(batch).cpu(), *self.held_out.features(batch)))
        clean, *features = (torch.cat(parts) for parts in zip(*rows, strict=True))
        if clean.var(dim=0, correction=0).mean() <= SMALLEST_SHARE * clean.square().mean():
            return None
        return LinearDenoiser(clean, features)

    @functools.cached_property
    def linear_errors(self) -> Tensor | None:
        """Return the linear denoisers' error at each level, the best of all that they try."""
        if not self.denoisers:
            return None
        has_holes = self.latents.voxel_effects is not None
        number = sum(denoiser.num_errors(has_holes) for denoiser in self.denoisers)
        totals = torch.zeros(len(self.held_out.levels), number, dtype=torch.float64)
        for batch in self._batches():
            clean, features = self.held_out.clean(batch).cpu(), self.held_out.features(batch)
            for place in range(len(totals)):
                noise, weights = self.held_out.noise(place, batch).cpu(), self.held_out.weights(batch)
                noisy = (clean, noise, *self._level(place), features, weights)
                totals[place] += torch.cat([denoiser.errors(*noisy) for denoiser in self.denoisers])
        return self.process.sum(totals).min(dim=1).values / self.num_held_out

    def _level(self, place: int) -> tuple[float, float]:
        """Return signal and noise at one level, scaled so that their squares add up to 1."""
        signal, noise = (float(part) for part in self.held_out.noise_process.coefficients(self.held_out.times[place]))
        return signal / math.hypot(signal, noise), noise / math.hypot(signal, noise)

    def _batches(self) -> Iterator[LatentBatch]:
        size = self.held_out.settings.ldm.training.batch_size
        return self.latents.validation_batches(self.encode, self.process, min(size, LARGEST_BATCH))


def _mean_square(errors: Tensor, weights: Tensor | None) -> Tensor:
    squares = errors.square() if weights is None else errors.square() * weights.to(errors.device)
    return squares.flatten(1).mean(dim=1, dtype=torch.float64).sum()


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
