"""Draws latents from the trained U-Net and decodes them to volumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffusion.conditioning import ConditionBatch, empty_condition, hidden
from diffusion.conditioning.class_label import ClassLabel
from diffusion.noise_process import NoiseProcess, predict
from diffusion.normalisation import Normalisation
from diffusion.samplers import SAMPLERS
from models.volume_codec import VolumeCodec
from runtime.randomness import SampleNoise
from settings import Settings
from settings.ldm import LdmSettings

Predict = Callable[[Tensor, Tensor], Tensor]

ConditionOf = Callable[[Sequence[int]], ConditionBatch]
"""Returns the conditions of samples by their positions."""


def guided(network: nn.Module, s: LdmSettings, condition: ConditionBatch) -> Predict:
    """Return a function that predicts from noisy latents and times, with guidance if the settings ask for it.

    A guidance scale of 1 gives the plain conditional prediction, 0 the one with all conditions hidden.
    """
    scale = s.sampling.guidance_scale
    multiple = s.unet.downsampling
    if not s.conditioning.is_used:
        return lambda noisy, times: predict(network, noisy, times, condition, multiple)
    nothing = hidden(condition, s.conditioning)
    both_conditions = condition.concatenate(nothing)

    def guide(noisy: Tensor, times: Tensor) -> Tensor:
        if scale in (0.0, 1.0):
            return predict(network, noisy, times, condition if scale else nothing, multiple)
        both = predict(network, torch.cat([noisy, noisy]), torch.cat([times, times]), both_conditions, multiple)
        with_condition, without = both.chunk(2)
        return without + scale * (with_condition - without)

    return guide


def num_predictions(s: LdmSettings) -> list[int]:
    """Return how many latents the network gets for one sample in each of its calls: two where guidance compares."""
    num_steps = s.sampling.num_inference_steps
    # Heun's rule reaches each time but the first by a trial step too.
    num_calls = 2 * num_steps - 1 if s.sampling.sampler == "heun" else num_steps
    compares = s.conditioning.is_used and s.sampling.guidance_scale not in (0.0, 1.0)
    return [2 if compares else 1] * num_calls


@torch.no_grad()
def sample_latents(
    predict: Predict,
    process: NoiseProcess,
    noise: SampleNoise,
    positions: Sequence[int],
    shape: Sequence[int],
    num_steps: int,
    sampler: str = "ddim",
    on_step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Draw one normalised latent of `shape` for each position, independent of the other positions.

    `on_step` is called when the network reaches a new time, so `num_steps` times.
    """
    latents = noise.normal("sample", positions, shape)
    dtype = torch.float32 if process.is_flow else torch.int64
    follow, choose_times = SAMPLERS[sampler]
    times = [
        torch.full((len(positions),), t, dtype=dtype, device=latents.device) for t in choose_times(process, num_steps)
    ]
    reached: Tensor | None = None

    def denoise(noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal reached
        result = process.clean_and_noise(predict(noisy, time).float(), noisy, time)
        if time is not reached:
            reached = time
            on_step()
        return result

    def fresh(number: int) -> Tensor:
        return noise.normal(f"sample step {number}", positions, shape)

    return follow(process, denoise, latents, times, fresh)


@dataclass(frozen=True)
class VolumeSampler:
    """Draws volumes from a trained U-Net; each depends on the seed and its position only.

    The network runs in float32 and the decoder on one volume at a time, because in 16 bits a sample would depend on the
    batch size.
    """

    network: nn.Module
    codec: VolumeCodec
    settings: Settings
    normalisation: Normalisation
    seed: int = 0
    batch_size: int = 1

    def draw(
        self,
        positions: Sequence[int],
        condition_of: ConditionOf | None = None,
        on_step: Callable[[], object] = lambda: None,
    ) -> Iterator[Tensor]:
        """Yield one volume (C, D, H, W), in the network's range, for each position.

        `condition_of` returns the conditions of some positions; without it all are hidden but the class, and the
        classes come in turn.
        """
        device, ldm = self.codec.precision.device, self.settings.ldm
        process, noise = NoiseProcess(ldm.scheduler, device), SampleNoise(self.seed, device)
        normalisation = self.normalisation.to(device)
        was_training = self.network.training
        self.network.eval()
        for start in range(0, len(positions), self.batch_size):
            part = positions[start : start + self.batch_size]
            condition = classes_in_turn(self.settings, part) if condition_of is None else condition_of(part)
            guide = guided(self.network, ldm, condition.to(device))
            steps, sampler, shape = ldm.sampling.num_inference_steps, ldm.sampling.sampler, self.settings.latent_shape
            with torch.autocast(device.type, enabled=False):
                latents = sample_latents(guide, process, noise, part, shape, steps, sampler, on_step)
            for latent in latents:
                yield self.codec.decode(normalisation.undo(latent))
        self.network.train(was_training)


def classes_in_turn(settings: Settings, positions: Sequence[int]) -> ConditionBatch:
    """Return a condition that is hidden but for the class; the classes come in turn."""
    condition = empty_condition(settings, len(positions))
    if settings.ldm.conditioning.type != "class":
        return condition
    classes = torch.tensor([position % settings.ldm.conditioning.num_classes for position in positions])
    return ConditionBatch({**condition.parts, ClassLabel.name: classes})
