"""Draws latents from the trained U-Net and decodes them to volumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from diffusion.conditioning import Condition, hidden
from diffusion.conditioning.conditions import empty_condition
from diffusion.noise_process import NoiseProcess, predict
from diffusion.normalisation import Normalisation
from diffusion.samplers import SAMPLERS
from models.volume_codec import VolumeCodec
from runtime.randomness import SampleNoise
from settings import Settings
from settings.ldm import LdmSettings

Predict = Callable[[Tensor, Tensor], Tensor]


def guided(network: nn.Module, s: LdmSettings, condition: Condition) -> Predict:
    """Return a function that predicts from noisy latents and times, with guidance if the settings ask for it.

    A guidance scale of 1 gives the plain conditional prediction, 0 the one with all conditions hidden.
    """
    scale = s.sampling.guidance_scale
    multiple = s.unet.downsampling
    if not s.conditioning.is_used:
        return lambda noisy, times: predict(network, noisy, times, condition, multiple)
    nothing = hidden(condition, s.conditioning)
    both_conditions = condition.beside(nothing)

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


def draw_volumes(
    network: nn.Module,
    codec: VolumeCodec,
    settings: Settings,
    normalisation: Normalisation,
    seed: int,
    positions: Sequence[int],
    condition_of: Callable[[Sequence[int]], Condition] | None = None,
    batch_size: int = 1,
    on_step: Callable[[], object] = lambda: None,
) -> Iterator[Tensor]:
    """Yield one volume (C, D, H, W), in the network's range, for each position; it depends on (seed, position) only.

    `condition_of` returns the conditions of some positions; without it all are hidden but the class, and the classes
    come in turn. The network runs in float32 and the decoder on one volume at a time, because in 16 bits a sample would
    depend on the batch size.
    """
    device = codec.precision.device
    ldm = settings.ldm
    process, noise = NoiseProcess(ldm.scheduler, device), SampleNoise(seed, device)
    normalisation = normalisation.to(device)
    was_training = network.training
    network.eval()
    for start in range(0, len(positions), batch_size):
        part = positions[start : start + batch_size]
        condition = classes_in_turn(settings, part) if condition_of is None else condition_of(part)
        guide = guided(network, ldm, condition.to(device))
        steps, sampler = ldm.sampling.num_inference_steps, ldm.sampling.sampler
        with torch.autocast(device.type, enabled=False):
            latents = sample_latents(guide, process, noise, part, settings.latent_shape, steps, sampler, on_step)
        for latent in latents:
            yield codec.decode(normalisation.undo(latent))
    network.train(was_training)


def classes_in_turn(settings: Settings, positions: Sequence[int], label: int | None = None) -> Condition:
    """Return a condition that is hidden but for the class: `label` if given, else the classes in turn."""
    nothing = empty_condition(settings, len(positions))
    number = settings.ldm.conditioning.num_classes
    if nothing.classes is None or settings.ldm.conditioning.type != "class":
        return nothing
    classes = [position % number if label is None else label for position in positions]
    return replace(nothing, classes=torch.tensor(classes))
