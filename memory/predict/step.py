"""Run the real training step under the tracker and summarise its peak."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memory.predict.allocator import replay
from memory.predict.emulation import emulated, tracked
from memory.predict.fake_shortcuts import CPU
from memory.predict.prediction import MARGINS, Prediction, Stage, tier_of
from memory.predict.tracker import Allocation, MemoryTracker
from runtime.processes import Process
from settings import Settings

NUM_LARGEST = 12
MAX_KERNEL_VOXELS = 64  # tells volumes from 16-bit copies of convolution weights, which have five axes too
CATEGORIES = ("parameters", "gradients", "optimizer", "ema", "inputs")


def build_step(settings: Settings, stage: Stage, device: torch.device = CPU) -> Any:
    """Build the training step of a stage without loading weight files."""
    assert stage in ("autoencoder", "ldm"), f"unknown stage {stage}"
    process = Process(device)
    if stage == "autoencoder":
        from training.autoencoder_step import AutoencoderStep

        return AutoencoderStep(settings, process, load_weights=False)
    from training.ldm_step import LatentDiffusionStep

    return LatentDiffusionStep(settings, process, load_weights=False)


def track_step(
    settings: Settings,
    stage: Stage,
    fake: bool = True,
    cuda: bool = True,
    build: Callable[[Settings, Stage], Any] = build_step,
) -> MemoryTracker:
    """Run the micro-batch that needs the most memory and return its tracker.

    The optimizer states exist, the adversarial term is active and, with accumulation, the gradients of earlier
    micro-batches exist too. So this peak is the peak of the whole training. With fake=False, run on real CPU tensors.
    """
    settings = _on_cpu(settings)
    training = settings.autoencoder.training if stage == "autoencoder" else settings.ldm.training
    with emulated(fake, cuda) as mode:
        step = build(settings, stage)
        with tracked(mode, cuda) as tracker:
            _adopt_step(tracker, step)
            for updater in step.updaters.values():
                _make_optimizer_state(updater)
                tracker.adopt(_tensors(updater.optimizer.state.values()), "optimizer")
                if training.gradient_accumulation_steps > 1:
                    for parameter in updater.parameters:
                        parameter.grad = torch.zeros_like(parameter)
                        tracker.adopt([parameter.grad], "gradients")
            batch = step.example_batch(training.batch_size)
            tracker.adopt(_tensors(_fields(batch)), "inputs")
            tracker.reset()
            step([batch], fullest_step(settings, stage))
    return tracker


def predict_step(settings: Settings, stage: Stage) -> Prediction:
    """Predict in this process; use `memory.predict.predict` to do it in a worker."""
    start = time.perf_counter()
    is_cuda = settings.device.type != "cpu"
    tracker = track_step(settings, stage, cuda=is_cuda)
    sizes = [record.nbytes if record.place == "device" else 0 for record in tracker.allocations]
    plain, expandable = (replay(tracker.trace, sizes, expandable_segments=flag).peak_reserved for flag in (False, True))
    uses_expandable = "expandable_segments:True" in settings.device.allocator
    reserved = expandable if uses_expandable else plain
    alive = tracker.alive_at_peak()
    grid = settings.training_grid if stage == "autoencoder" else settings.latent_shape[1:]
    training = settings.autoencoder.training if stage == "autoencoder" else settings.ldm.training
    updates = training.gradient_accumulation_steps
    flops = tracker.flops
    tier = tier_of(settings, stage)
    return Prediction(
        stage=stage,
        tier=tier,
        peak_allocated_bytes=tracker.peak["device"],
        peak_reserved_bytes=reserved if is_cuda else tracker.peak["device"],
        peak_reserved_default_bytes=plain,
        peak_reserved_expandable_bytes=expandable,
        host_bytes=tracker.peak["host"],
        phase=max(tracker.phase_peaks, key=lambda name: tracker.phase_peaks[name]),
        phase_peaks=tracker.phase_peaks,
        breakdown=_breakdown(alive),
        activations=_by_module_and_level(alive, grid),
        largest=[_describe(record) for record in sorted(alive, key=lambda record: -record.nbytes)[:NUM_LARGEST]],
        flops={
            "forward": flops.forward * updates,
            "backward": flops.backward * updates,
            "recompute": flops.recompute * updates,
            "attention": flops.attention * updates,
            "total": flops.total * updates,
        },
        attention=attention_growth(settings, stage),
        margin=MARGINS[tier],
        seconds=round(time.perf_counter() - start, 2),
        context_bytes=Prediction.context_bytes if is_cuda else 0,
    )


def attention_growth(settings: Settings, stage: Stage) -> list[dict[str, Any]]:
    """Return tokens, bytes and FLOPs of one attention block per attention level, now and with every axis doubled.

    The scaled-dot-product kernel saves query, key, value and result, which is linear in the number of tokens. A matrix
    of attention weights would be quadratic, as is the compute of both.
    """
    network = settings.autoencoder if stage == "autoencoder" else settings.ldm.unet
    grid = settings.training_grid if stage == "autoencoder" else settings.latent_shape[1:]
    width = 2 if settings.device.mixed_precision else 4
    rows = []
    for level, (channels, attends) in enumerate(zip(network.num_channels, network.attention_levels, strict=True)):
        for factor in (1, 2) if attends else ():
            shape = [axis * factor // 2**level for axis in grid]
            tokens = math.prod(shape)
            heads = channels // settings.ldm.unet.head_channels[level] if stage == "ldm" else 1
            rows.append(
                {
                    "level": level,
                    "grid_factor": factor,
                    "grid": shape,
                    "tokens": tokens,
                    "kernel_bytes": tokens * (4 * channels * width + 4 * heads),
                    "matrix_bytes": heads * tokens**2 * width,
                    "flops": 4 * tokens**2 * channels,
                }
            )
    return rows


def _on_cpu(settings: Settings) -> Settings:
    """Return the settings that make the step run on CPU tensors in the precision that a current GPU chooses."""
    dtype = "bfloat16" if settings.device.amp_dtype == "auto" else settings.device.amp_dtype
    return settings.with_overrides({"device.type": "cpu", "device.amp_dtype": dtype})


def fullest_step(settings: Settings, stage: Stage) -> int:
    """Return the number of a step in which every loss term is active."""
    if stage == "ldm":
        return 0
    training = settings.autoencoder.training
    return min(training.adversarial_start_step, training.last_step - 1)


def _adopt_step(tracker: MemoryTracker, step: Any) -> None:
    """Give the tracker the names of the networks and the categories of tensors that outlive a step."""
    for name, value in vars(step).items():
        if isinstance(value, nn.Module) and not name.startswith("_"):
            tracker.name_modules(name, value)
            tracker.adopt([*value.parameters(), *value.buffers()], "parameters")
            tracker.adopt_gradients(value.parameters())
    if getattr(step, "average", None) is not None:
        tracker.adopt(step.average.averages, "ema")


@torch.no_grad()
def _make_optimizer_state(updater: Any) -> None:
    """Make the optimizer allocate its states, which exist from the first update on."""
    for parameter in updater.parameters:
        parameter.grad = torch.zeros_like(parameter)
    updater.optimizer.step()
    updater.optimizer.zero_grad(set_to_none=True)


def _fields(batch: Any) -> list[Any]:
    return [getattr(batch, name) for name in getattr(batch, "__dataclass_fields__", None) or batch._fields]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _breakdown(alive: list[Allocation]) -> dict[str, int]:
    sums: Counter[str] = Counter(dict.fromkeys((*CATEGORIES, "activations", "other"), 0))
    for record in alive:
        sums[record.category or ("activations" if record.module else "other")] += record.nbytes
    return dict(sums)


def level_of(shape: tuple[int, ...], grid: tuple[int, ...]) -> int | None:
    """Return the resolution level of a tensor, 0 for the full grid; None for tensors without a grid.

    Decided by the last axis, because slabs split the first one; rounding absorbs the rows that padding adds.
    """
    if len(shape) == 5 and math.prod(shape[2:]) > MAX_KERNEL_VOXELS:
        return max(0, round(math.log2(grid[-1] / shape[-1])))
    if len(shape) in (3, 4) and max(shape) > MAX_KERNEL_VOXELS:
        tokens = max(shape)
        return max(0, round(math.log2(math.prod(grid) / tokens) / 3))
    return None


def _by_module_and_level(alive: list[Allocation], grid: tuple[int, ...]) -> list[dict[str, Any]]:
    sums: Counter[tuple[str, int | None]] = Counter()
    for record in alive:
        if not record.category and record.module:
            sums[".".join(record.module.split(".")[:2]), level_of(record.shape, grid)] += record.nbytes
    return [
        {"module": module, "level": level, "bytes": nbytes} for (module, level), nbytes in sums.most_common() if nbytes
    ]


def _describe(record: Allocation) -> dict[str, Any]:
    return {
        "bytes": record.nbytes,
        "shape": list(record.shape),
        "dtype": record.dtype,
        "module": record.module,
        "category": record.category or "activations",
        "op": record.op,
        "phase": record.phase,
    }
