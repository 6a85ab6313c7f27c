"""Skill: the network's held-out error in the clean latent, divided by that of the best linear denoiser.

Below 1 the network knows more about the volumes than their mean and covariance; one that is switched off is above.
Both see the same noisy latents and, if there are any, the same conditions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion.conditioning import error_weights
from diffusion.latent_batches import LatentBatch
from diffusion.latents import Latents
from diffusion.noise_process import NoiseProcess, predict
from diffusion.normalisation import Normalisation
from models.volume_codec import VolumeCodec
from runtime.precision import Precision
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import Settings
from training.validation.skill.linear_denoiser import SMALLEST_SHARE, LinearDenoiser

NUM_LEVELS = 8
ANGLES = tuple((place + 0.5) / NUM_LEVELS * math.pi / 2 for place in range(NUM_LEVELS))
"""Noise levels between clean and noise: the angles whose tangent is the ratio of noise to signal."""

LARGEST_BATCH = 16
"""Held-out latents are denoised in batches like those of training, whose memory is enough, but of at most so many."""

MOST_EXAMPLES = 1536
MOST_EXAMPLES_WITH_HOLES = 512
MOST_VALUES = 2**26
"""The linear denoiser is fitted to at most this many training latents, and to fewer if they have more values in all.

Each hole takes equations of its own, with as many unknowns as there are examples.
"""


def skill_in_words(skill: float, has_holes: bool = False) -> str:
    """Return what a mean skill says about the network; as much as three digits show."""
    skill = round(skill, 3)
    where, given = (" in the hole", " given the rest of the volume") if has_holes else ("", "")
    if skill < 1:
        below = f"on average {1 - skill:.1%} below that of the best linear denoiser{given}"
        return f"skill {skill:.3f}: the network's held-out error{where} is {below}"
    if skill > 10:
        return (
            f"skill {skill:.3f}: the network's held-out error{where} is {skill:.0f} times that of the best linear "
            f"denoiser{given}; it has hardly learned yet, or the volumes are so alike that a linear denoiser is nearly "
            "exact"
        )
    return (
        f"skill {skill:.3f}: the network is no better yet{where} than the best linear denoiser{given}, which has 1 and "
        "knows only means and covariances; train longer, or compress more"
    )


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
        """Return all opponents: `denoiser` and, of a run that augments, that of the volumes and their copies."""
        files, copies = range(len(self.latents.volumes.train)), range(self.latents.num_copies + 1)
        opponents = [self.denoiser]
        if len(files) < self._most_examples and len(copies) > 1:
            opponents.append(self._fitted([(i, copy) for copy in copies for i in files][: self._most_examples]))
        return [opponent for opponent in opponents if opponent is not None]

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
            batch = LatentBatch(latent[None], (index,), self.latents.condition([index], [copy]))
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
        number = sum(opponent.num_errors(has_holes) for opponent in self.denoisers)
        totals = torch.zeros(len(self.held_out.levels), number, dtype=torch.float64)
        for batch in self._batches():
            clean, features = self.held_out.clean(batch).cpu(), self.held_out.features(batch)
            for place in range(len(totals)):
                noise, weights = self.held_out.noise(place, batch).cpu(), self.held_out.weights(batch)
                noisy = (clean, noise, *self._level(place), features, weights)
                totals[place] += torch.cat([opponent.errors(*noisy) for opponent in self.denoisers])
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
