"""The parts of a run besides its training step: validation, encoding the latents, sampling, reconstructing.

Whole volumes go through the codec, which turns to slabs when memory is short. What is predicted of them is therefore
what they need in slabs, unless the blocks are MONAI's, which have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from diffusion.conditioning import empty_condition, kinds_of
from diffusion.latent_batches import LatentBatch
from diffusion.normalisation import Normalisation
from diffusion.sampling import VolumeSampler, guided, num_predictions
from memory.kernels.operators import Done, combined
from memory.predict.allocator import AllocatorLimits, replay
from memory.predict.emulation import emulated, tracked
from memory.predict.known_results import CPU
from memory.predict.prediction import PREVIEWS, VALIDATED_VOLUME, Stage
from memory.predict.tracker import MemoryTracker
from models import build_unet
from models.volume_codec import VolumeCodec, frozen_codec
from runtime.observer import phase
from runtime.processes import Process
from settings import Settings
from settings.ldm import NUM_PREVIEWS
from training.validation.autoencoder_validation import reconstruct_and_measure
from training.validation.skill import NUM_LEVELS, HeldOut

USED_SHARE = 0.8
"""Share of the free memory that a batch of samples may take; the rest is for fragments and the decoder."""

VALIDATION, ENCODING, SAMPLING, RECONSTRUCTION = "validation", "encoding the latents", "sampling", "reconstruct.py"


def run_validation(step: Any, settings: Settings, stage: Stage, tracker: MemoryTracker) -> dict[str, Done]:
    """Validate one volume as training does, right after a step; return what each part of a validation does."""

    def done_by(run: Callable[[], object]) -> Done:
        tracker.work = {}
        run()
        return tracker.work

    with phase(VALIDATION), torch.no_grad():
        if stage == "autoencoder":
            image = _volume(settings)[None]
            return {VALIDATED_VOLUME: done_by(lambda: reconstruct_and_measure(step, image))}
        codec = VolumeCodec(step.autoencoder, settings.autoencoder, step.precision, budget_bytes=0)
        step.unet.eval()
        zeros = torch.zeros(1, *settings.latent_shape)
        batch = LatentBatch(zeros, (0,), empty_condition(settings, 1))
        held_out = HeldOut(settings, step.normalisation, step.precision)
        losses = done_by(lambda: held_out.errors(step.unet, batch))
        drawn = done_by(lambda: _sample(step.unet, codec, settings))
        decoded = done_by(lambda: codec.decode(zeros[0]))
        return {VALIDATED_VOLUME: losses, PREVIEWS: _all_previews(settings, losses, drawn, decoded)}


def _all_previews(settings: Settings, losses: Done, drawn: Done, decoded: Done) -> Done:
    """Return what all samples of a validation do.

    It follows from one batch that took the steps of `_shortened` and of which one was decoded, and from one more
    decoding.
    """
    batch = _preview_batch(settings)
    # The last batch may be smaller, so this is not a whole number.
    batches = NUM_PREVIEWS / batch
    num_left = sum(num_predictions(settings.ldm)) - sum(num_predictions(_shortened(settings).ldm))
    # A held-out loss calls the U-Net once at each noise level with one latent.
    steps = batches * batch * max(0, num_left) / NUM_LEVELS
    return combined([(batches, drawn), (batches * (batch - 1), decoded), (steps, losses)])


def other_programs(settings: Settings, stage: Stage, cuda: bool, without_triton: int = 0) -> dict[str, MemoryTracker]:
    """Return the trackers of what runs before or after training, in memory of its own."""

    def track(program: Callable[[], object]) -> MemoryTracker:
        with emulated(cuda=cuda) as mode, tracked(mode, cuda, without_triton) as tracker, torch.no_grad():
            program()
        return tracker

    def reconstruct() -> None:
        codec = _codec(settings)
        codec.decode(codec.encode(_volume(settings)))

    def sample() -> None:
        unet, codec = _unet(settings), _codec(settings)
        if _encodings(settings)[1]:
            codec.encode(_volume(settings))
        _sample(unet, codec, settings)

    if stage == "autoencoder":
        return {RECONSTRUCTION: track(reconstruct)}
    programs = {SAMPLING: track(sample)}
    if any(_encodings(settings)):
        programs[ENCODING] = track(lambda: _codec(settings).encode(_volume(settings)))
    return programs


def _encodings(settings: Settings) -> tuple[int, int]:
    """Return how often the autoencoder encodes each volume before stage 2: for a kept latent, and for conditions."""
    conditions = sum(kind.num_encodings for kind in kinds_of(settings.ldm.conditioning))
    return int(settings.ldm.latents.cache != "none"), conditions


def encoded_volume(settings: Settings, programs: Mapping[str, MemoryTracker]) -> Done | None:
    """Return what a volume and its conditions take to be encoded; None if nothing is encoded."""
    return combined([(sum(_encodings(settings)), programs[ENCODING].work)]) if ENCODING in programs else None


def peaks(tracker: MemoryTracker, limits: AllocatorLimits, is_cuda: bool) -> dict[str, int]:
    """Return the allocated and the reserved peak of everything that a tracker saw."""
    sizes = [record.nbytes if record.place == "device" else 0 for record in tracker.allocations]
    reserved = replay(tracker.trace, sizes, limits).peak_reserved if is_cuda else tracker.peak["device"]
    return {"allocated_bytes": tracker.peak["device"], "reserved_bytes": reserved}


def _codec(settings: Settings) -> VolumeCodec:
    return frozen_codec(settings, Process(CPU), load_weights=False, budget_bytes=0)


def _unet(settings: Settings) -> torch.nn.Module:
    return build_unet(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape)


def _volume(settings: Settings) -> torch.Tensor:
    return torch.zeros(settings.autoencoder.in_channels, *settings.data.voxel_size)


def _sample(unet: torch.nn.Module, codec: VolumeCodec, settings: Settings) -> None:
    """Draw one batch of samples in few steps and decode the first of them; samples are decoded one by one."""
    short = _shortened(settings)
    batch = _preview_batch(settings)
    volume_before = _volume(settings)  # whoever asked for the samples still has it
    neutral = Normalisation.uniform(settings.autoencoder.latent_channels)
    next(VolumeSampler(unet, codec, short, neutral, batch_size=batch).draw(range(batch)))
    del volume_before


def sampling_batch(settings: Settings, cuda: bool, free_bytes: int, most: int) -> int:
    """Return how many samples fit into the free memory at once, at least 1 and at most `most`.

    The networks are there already. What denoising needs grows in proportion to the number of samples, from three on: on
    a CPU some convolutions of one or two small samples are computed in another way.
    """
    three, four = (_denoising_bytes(settings, cuda, number) for number in (3, 4))
    return max(1, min(most, 3 + int((USED_SHARE * free_bytes - three) // (four - three))))


def _denoising_bytes(settings: Settings, cuda: bool, number: int) -> int:
    """Return what one denoising step of some samples needs besides the weights."""
    with emulated(cuda=cuda) as mode, tracked(mode, cuda) as tracker, torch.no_grad():
        unet = _unet(settings).eval()
        latents, times = torch.zeros(number, *settings.latent_shape), torch.zeros(number, dtype=torch.long)
        predict = guided(unet, settings.ldm, empty_condition(settings, number))
        tracker.reset()
        there = tracker.live["device"]
        predict(latents, times)
        return tracker.peak["device"] - there


def _shortened(settings: Settings) -> Settings:
    """Return the settings with at most two steps, which need the memory of all."""
    steps = min(2, settings.ldm.sampling.num_inference_steps)
    return settings.with_overrides({"ldm.sampling.num_inference_steps": steps})


def _preview_batch(settings: Settings) -> int:
    return min(settings.ldm.training.batch_size, NUM_PREVIEWS)
