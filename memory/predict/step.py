"""Run the real training step under the tracker, and what a run does besides it, and summarise their peaks.

Beside the step are validation, encoding the latents, sampling and reconstructing. Whole volumes go through the codec,
which turns to slabs when memory is short. What is predicted of them is therefore what they need in slabs, unless the
blocks are MONAI's, which have none.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from diffusion.conditioning import empty_condition, kinds_of
from diffusion.latents import LatentBatch
from diffusion.normalisation import Normalisation
from diffusion.sampling import VolumeSampler, guided, num_predictions
from memory.kernels.convolutions import limited_to
from memory.kernels.operators import Done, combined, work_parts
from memory.predict.allocator import AllocatorLimits, replay, replay_pinned, replay_training
from memory.predict.emulation import CopiedWeights, emulated, place, tracked
from memory.predict.known_results import CPU
from memory.predict.prediction import (
    ENCODED_VOLUME,
    GIB,
    MARGINS,
    NOT_PREDICTED,
    NOT_PREDICTED_ON_CPU,
    PREVIEWS,
    VALIDATED_VOLUME,
    Prediction,
    Stage,
    fingerprint,
    fullest_step,
    tier_of,
)
from memory.predict.tracker import (
    CONVOLUTION_WORKSPACES,
    LIBRARY_WORKSPACES,
    WORKSPACE,
    Allocation,
    MemoryTracker,
    StepEvents,
)
from models import build_unet
from models.volume_codec import VolumeCodec, frozen_codec
from runtime.observer import observed_by, phase
from runtime.precision import onednn_limit
from runtime.processes import Process
from settings import Settings
from settings.ldm import NUM_PREVIEWS
from training.optimization import Updater
from training.step import TrainingStep
from training.validation.skill import NUM_LEVELS, HeldOut
from training.validation.stages import reconstruct_and_measure

NUM_LARGEST = 12
MAX_KERNEL_VOXELS = 64  # tells volumes from 16-bit copies of convolution weights, which have five axes too
CATEGORIES = (
    *("parameters", "gradients", "optimizer", "ema", "inputs"),
    *(CONVOLUTION_WORKSPACES, LIBRARY_WORKSPACES),
)
USED_SHARE = 0.8
"""Share of the free memory that a batch of samples may take; the rest is for fragments and the decoder."""

VALIDATION, ENCODING, SAMPLING, RECONSTRUCTION = "validation", "encoding the latents", "sampling", "reconstruct.py"


def build_step(settings: Settings, stage: Stage, device: torch.device = CPU) -> TrainingStep:
    """Build the training step of a stage without loading weight files."""
    assert stage in ("autoencoder", "ldm"), f"unknown stage {stage}"
    process = Process(device)
    if stage == "autoencoder":
        from training.autoencoder_step import AutoencoderStep

        return AutoencoderStep(settings, process, load_weights=False)
    from training.ldm_step import LatentDiffusionStep

    return LatentDiffusionStep(settings, process, load_weights=False)


@contextmanager
def tracked_step(
    settings: Settings,
    stage: Stage,
    fake: bool = True,
    cuda: bool = True,
    build: Callable[[Settings, Stage], TrainingStep] = build_step,
    without_triton: int = 0,
) -> Iterator[tuple[TrainingStep, MemoryTracker]]:
    """Run the micro-batch that needs the most memory; yield the step and its tracker, which goes on in the block.

    The optimizer states exist, the adversarial term is active and, with accumulation, the gradients of earlier
    micro-batches exist too. So this peak is the peak of the whole training. With fake=False, run on real CPU tensors.
    """
    settings = _on_cpu(settings, cuda)
    training = settings.training_of(stage)
    with emulated(fake, cuda) as mode:
        copied = CopiedWeights()
        with MemoryTracker(cuda, mode) if fake else nullcontext(), observed_by(copied):
            step = build(settings, stage)
            batch = step.example_batch(training.batch_size)
        with tracked(mode, cuda, without_triton) as tracker:
            tracker.benchmarks = True
            _adopt_step(tracker, step, copied.weights)
            for updater in step.updaters.values():
                make_optimizer_state(updater)
                for optimizer in updater.optimizers:
                    tracker.adopt(_tensors(optimizer.state), "optimizer")
                if training.gradient_accumulation_steps > 1:
                    for parameter in updater.parameters:
                        parameter.grad = torch.zeros_like(parameter)
                        tracker.adopt([parameter.grad], "gradients")
                tracker.updaters.append((len(tracker.allocations), {id(part) for part in updater.parameters}))
            if not (fake and cuda):
                tracker.adopt(_tensors(batch), "inputs")
            tracker.reset()
            number, start = fullest_step(settings, stage), len(tracker.trace)
            with tracker.waiting_on_host(_tensors(batch) if fake and cuda else ()):
                step.backward([batch], number)
                update = len(tracker.trace)
                tracker.of_micro_batch = tracker.flops.copy(), combined([(1, tracker.work)])
                step.update(number)
            tracker.step = StepEvents(start, update, len(tracker.trace))
            del batch
            yield step, tracker


def predict_step(settings: Settings, stage: Stage, whole_run: bool = True, without_triton: int = 0) -> Prediction:
    """Predict in this process; a `Predictor` does it in a worker.

    whole_run: also what validation and the programs around training need. without_triton: as in `MemoryTracker`.
    """
    start = time.perf_counter()
    is_cuda, training = settings.device.type != "cpu", settings.training_of(stage)
    limits, default = AllocatorLimits.parse(settings.device.allocator), AllocatorLimits()
    expandable = AllocatorLimits(expandable_segments=True)
    grid = settings.training_grid if stage == "autoencoder" else settings.unet_grid
    run_peaks: dict[str, dict[str, int]] = {}
    beside: dict[str, Done] = {}
    with limited_to(onednn_limit(settings.device)):  # as the process that trains will be
        with tracked_step(settings, stage, cuda=is_cuda, without_triton=without_triton) as (step, tracker):
            peak, phase_peaks, alive = tracker.peak["device"], tracker.phase_peaks, tracker.alive_at_peak()
            # The buckets of several processes have room for all gradients; those at the peak live in them.
            trained = sum(weight.nbytes for updater in step.updaters.values() for weight in updater.parameters)
            # An update has as many micro-batches as are accumulated, but moves the weights once.
            more = training.gradient_accumulation_steps - 1
            flops, work = tracker.flops, combined([(1, tracker.work), (more, tracker.of_micro_batch[1])])
            for name, number in tracker.of_micro_batch[0].items():
                flops[name] += more * number
            on_host = [record.nbytes if record.place == "host" else 0 for record in tracker.allocations]
            host_bytes = replay_pinned(tracker.trace, on_host) if is_cuda else tracker.peak["host"]
            reserved = {
                chosen: max(replay_training(tracker, chosen).peak_reserved, peak)
                for chosen in ({default, expandable, limits} if is_cuda else ())
            }
            if whole_run:
                tracker.reset()
                beside = run_validation(step, settings, stage, tracker)
        if whole_run:
            programs = other_programs(_on_cpu(settings, is_cuda), stage, is_cuda, without_triton)
            run_peaks = {name: peaks(t, limits, is_cuda) for name, t in {VALIDATION: tracker, **programs}.items()}
            if (encoded := encoded_volume(settings, programs)) is not None:
                beside[ENCODED_VOLUME] = encoded
    num_phantoms = settings.data.num_phantoms or 0
    held_out = settings.data.num_held_out(num_phantoms) if num_phantoms else 0
    tier, breakdown = tier_of(settings, stage), _breakdown(alive)
    purposes = ("forward", "backward", "recompute")
    return Prediction(
        stage=stage,
        tier=tier,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved.get(limits, peak),
        peak_reserved_default_bytes=reserved.get(default, peak),
        peak_reserved_expandable_bytes=reserved.get(expandable, peak),
        host_bytes=host_bytes,
        phase=max(phase_peaks, key=lambda name: phase_peaks[name]),
        phase_peaks=phase_peaks | {name: both["allocated_bytes"] for name, both in run_peaks.items()},
        breakdown=breakdown,
        largest=[_describe(record) for record in sorted(alive, key=lambda record: -record.nbytes)[:NUM_LARGEST]],
        flops={name: flops[name] for name in (*purposes, "attention")} | {"total": sum(flops[n] for n in purposes)},
        margin=MARGINS[tier],
        seconds=round(time.perf_counter() - start, 2),
        workspace_bytes=tracker.workspace,
        traffic_bytes=sum(done.nbytes for key, done in work.items() if key[2] != WORKSPACE),
        kernels=sum(done.kernels for done in work.values()),
        work=work_parts(work, lambda shape: level_of(shape, grid)),
        beside={name: work_parts(done) for name, done in beside.items()},
        num_validations=math.ceil(training.max_steps / training.validate_every),
        num_volumes=[num_phantoms - held_out, held_out],  # zeros if only the data can tell
        run_peaks=run_peaks,
        warnings=_warnings(tracker),
        max_steps=training.max_steps,
        bucket_bytes=max(0, trained - breakdown["gradients"]),
        config=fingerprint(settings, stage),
        context_bytes=Prediction.context_bytes if is_cuda else 0,
        not_predicted=NOT_PREDICTED if is_cuda else NOT_PREDICTED_ON_CPU,
    )


def _warnings(tracker: MemoryTracker) -> list[str]:
    """Return what about a device makes a step need much more than on others."""
    texts = []
    if tracker.unfolded:
        texts.append(
            f"cuDNN {tracker.cudnn} does not compute these convolutions; torch unfolds them into copies of up to "
            f"{tracker.unfolded / GIB:.1f} GiB; use slabs (autoencoder.training.slab_rows), patches (data.patch_size), "
            "a smaller grid, device.memory_format=channels_last, or another cuDNN"
        )
    if tracker.without_triton:
        texts.append("this GPU cannot run Triton, so its norms are slower and copy volumes to fp32, which is counted")
    return texts


def _on_cpu(settings: Settings, cuda: bool) -> Settings:
    """Return the settings that make the step run on CPU tensors; `cuda`: in the precision of a current GPU."""
    is_chosen = cuda and settings.device.amp_dtype == "auto"
    return settings.with_overrides({"device.type": "cpu", **({"device.amp_dtype": "bfloat16"} if is_chosen else {})})


def _adopt_step(tracker: MemoryTracker, step: TrainingStep, copied: list[Tensor]) -> None:
    """Give the tracker the names of the networks and the categories of tensors that outlive a step."""
    for name, network in step.networks_on_device.items():
        tracker.name_modules(name, network)
        place(tracker, [*network.parameters(), *network.buffers()], copied)
        tracker.adopt_gradients(network.parameters())
        if step.average is not None and network is step.network:
            tracker.adopt(step.average.averages, "ema")
    tracker.adopt(step.tensors_on_device, "parameters")


@torch.no_grad()
def make_optimizer_state(updater: Updater) -> None:
    """Make the optimizers allocate their states, which exist from the first update on."""
    for parameter in updater.parameters:
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in updater.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, or of the states of an optimizer."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict) or is_dataclass(value):
        for part in value.values() if isinstance(value, dict) else vars(value).values():
            yield from _tensors(part)


def _breakdown(alive: list[Allocation]) -> dict[str, int]:
    sums: Counter[str] = Counter(dict.fromkeys((*CATEGORIES, "activations", "other"), 0))
    for record in alive:
        sums[record.category or ("activations" if record.module else "other")] += record.nbytes
    return dict(sums)


def level_of(shape: tuple[int, ...], grid: tuple[int, ...]) -> int | None:
    """Return the resolution level of a tensor, 0 for the full grid; None for tensors without a grid.

    Decided by the last two axes, because slabs split the first one, and by the one that shrinks more, because strides
    may be 1; rounding absorbs the rows that padding adds.
    """
    if len(shape) == 5 and math.prod(shape[2:]) > MAX_KERNEL_VOXELS:
        return max(0, round(math.log2(max(size / found for size, found in zip(grid[1:], shape[3:], strict=True)))))
    if len(shape) in (3, 4) and max(shape) > MAX_KERNEL_VOXELS:
        tokens = max(shape)
        return max(0, round(math.log2(math.prod(grid) / tokens) / 3))
    return None


def _describe(record: Allocation) -> dict[str, Any]:
    plain = {name: getattr(record, name) for name in ("dtype", "module", "op", "phase")}
    return {"bytes": record.nbytes, "shape": list(record.shape), "category": record.category or "activations", **plain}


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
