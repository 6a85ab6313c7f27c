"""The samplers: each is one function that follows the times of a noise process from noise to a clean latent.

A sampler gets `denoise`, which returns the clean latent and the noise that the network predicts for a noisy latent, and
`fresh`, which draws new noise for a step. All samplers but ddpm are deterministic. Each calls the network once per
step; heun calls it twice, except in the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from diffusion.noise_process import NoiseProcess

Denoise = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Fresh = Callable[[int], Tensor]
Sampler = Callable[[NoiseProcess, Denoise, Tensor, Sequence[Tensor], Fresh], Tensor]


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
