"""Draws latents from the trained U-Net and decodes them to volumes.

A sampler is one function that follows the times of a noise process from noise to a clean latent. It gets `denoise`,
which returns the clean latent and the noise that the network predicts for a noisy latent, and `fresh`, which draws new
noise for a step. All samplers but ddpm are deterministic. Each calls the network once per step; heun calls it twice,
except in the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from diffusion.conditioning import ConditionBatch, empty_condition, hidden
from diffusion.conditioning.class_label import ClassLabel
from diffusion.noise_process import NoiseProcess, predict
from diffusion.normalisation import Normalisation
from models.volume_codec import VolumeCodec
from runtime.randomness import SampleNoise
from settings import Settings
from settings.ldm import LdmSettings

Predict = Callable[[Tensor, Tensor], Tensor]

Denoise = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Fresh = Callable[[int], Tensor]
Sampler = Callable[[NoiseProcess, Denoise, Tensor, Sequence[Tensor], Fresh], Tensor]

ConditionOf = Callable[[Sequence[int]], ConditionBatch]
"""Returns the conditions of samples by their positions."""


def ddim(process: NoiseProcess, denoise: Denoise, latents: Tensor, times: Sequence[Tensor], fresh: Fresh) -> Tensor:
    """Keep the noise that the network predicts (Song et al. 2021, equation 12); Euler's rule for rectified flow."""
    for time, after in pairwise(times):
        clean, noise = denoise(latents, time)
        signal, level = process.coefficients(after)
        latents = signal * clean + level * noise
    return denoise(latents, times[-1])[0]


def ddpm(process: NoiseProcess, denoise: Denoise, latents: Tensor, times: Sequence[Tensor], fresh: Fresh) -> Tensor:
    """Draw from the posterior between two times, for any stride (equations 12 and 16 of the DDIM paper, eta = 1)."""
    for number, (time, after) in enumerate(pairwise(times)):
        clean, noise = denoise(latents, time)
        signal, level = process.coefficients(time)
        next_signal, next_level = process.coefficients(after)
        variance = (next_level / level).square() * (1 - (signal / next_signal).square())
        kept = (next_level.square() - variance).clamp_min(0).sqrt()
        latents = next_signal * clean + kept * noise + variance.sqrt() * fresh(number)
    return denoise(latents, times[-1])[0]


def dpmpp_2m(process: NoiseProcess, denoise: Denoise, latents: Tensor, times: Sequence[Tensor], fresh: Fresh) -> Tensor:
    """Extrapolate the clean latent from two steps: DPM-Solver++(2M) (Lu et al. 2022, algorithm 2).

    The first and the last step are of first order. With equally spaced times, the last step would have to go most of
    the way to the clean latent.
    """
    before, stride_before = None, None
    for time, after in pairwise(times):
        clean, _ = denoise(latents, time)
        signal, level = process.coefficients(time)
        next_signal, next_level = process.coefficients(after)
        # The half log-SNR falls to minus infinity in pure noise; a step from there has no weight in the next one.
        stride = (next_signal / next_level).log() - (signal / level).log()
        towards = clean
        if before is not None and stride_before is not None:
            # Rounded to whole timesteps, two times may be equal.
            share = torch.where(stride_before > 0, stride / (2 * stride_before), 0.0)
            towards = clean + share * (clean - before)
        latents = next_level / level * latents + (next_signal - next_level * signal / level) * towards
        before, stride_before = clean, stride
    return denoise(latents, times[-1])[0]


def heun(process: NoiseProcess, denoise: Denoise, latents: Tensor, times: Sequence[Tensor], fresh: Fresh) -> Tensor:
    """Average the velocities at both ends of each step of rectified flow; the last step is Euler's."""
    for time, after in pairwise(times):
        length = process.coefficients(time)[1] - process.coefficients(after)[1]
        clean, noise = denoise(latents, time)
        slope = clean - noise
        clean, noise = denoise(latents + length * slope, after)
        latents = latents + length * (slope + clean - noise) / 2
    return denoise(latents, times[-1])[0]


SAMPLERS: dict[str, tuple[Sampler, Callable[[NoiseProcess, int], list[float]]]] = {
    "ddim": (ddim, NoiseProcess.sampling_times),
    "ddpm": (ddpm, NoiseProcess.sampling_times),
    "dpmpp_2m": (dpmpp_2m, NoiseProcess.sampling_times_by_angle),
    "rflow": (ddim, NoiseProcess.sampling_times),
    "heun": (heun, NoiseProcess.sampling_times),
}
"""Each sampler by its name in the config, and how its times are chosen."""


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
            condition = empty_condition(self.settings, len(part)) if condition_of is None else condition_of(part)
            if condition_of is None and ldm.conditioning.type == "class":
                classes = torch.tensor([position % ldm.conditioning.num_classes for position in part])
                condition = ConditionBatch({**condition.parts, ClassLabel.name: classes})
            guide = guided(self.network, ldm, condition.to(device))
            steps, sampler, shape = ldm.sampling.num_inference_steps, ldm.sampling.sampler, self.settings.latent_shape
            with torch.autocast(device.type, enabled=False):
                latents = sample_latents(guide, process, noise, part, shape, steps, sampler, on_step)
            for latent in latents:
                yield self.codec.decode(normalisation.undo(latent))
        self.network.train(was_training)
