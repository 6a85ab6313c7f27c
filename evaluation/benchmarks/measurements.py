"""Peak memory of one whole training step on a GPU, predicted on fake tensors, and its time on this machine's CPU."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from evaluation.benchmarks.variants import STOCK, VARIANTS, base_settings, use_matrix_attention
from memory.predict import Predictor
from settings import Settings

REFERENCE = "3d_ldm-style loop, fp32"
Row = dict[str, Any]
Progress = Callable[[str], None]


def measure_peaks(grids: Sequence[tuple[int, ...]], progress: Progress) -> list[Row]:
    """Return peak bytes and FLOPs by grid and variant."""
    rows = []
    for grid in grids:
        predictions = _predicted(base_settings(grid, mixed_precision=True), progress, has_reference=True)
        ours = {variant.name for variant in VARIANTS if variant.is_ours}
        rows += [{"grid": list(grid), "variant": name, "is_ours": name in ours, **v} for name, v in predictions.items()]
    return rows


def measure_steps(
    grid: tuple[int, ...], rounds: int, progress: Progress, channels: tuple[int, ...] = (16, 32, 64)
) -> list[Row]:
    """Return CPU seconds of a whole fp32 step by variant, its ratio to stock within a round, and its predicted peak.

    CPU seconds depend little on what else the machine is doing.
    """
    import torch

    from data import Batch
    from runtime.processes import Process
    from training.autoencoder_step import AutoencoderStep

    settings = base_settings(grid, mixed_precision=False, channels=channels)
    steps: dict[str, AutoencoderStep] = {}
    for variant in VARIANTS:
        on_cpu = settings.with_overrides({**variant.changes, "device.type": "cpu"})
        steps[variant.name] = AutoencoderStep(on_cpu, Process(torch.device("cpu")))
        if variant.has_matrix:
            use_matrix_attention(steps[variant.name].autoencoder)
    image = torch.rand(1, 1, *grid, generator=torch.Generator().manual_seed(0)) * 2 - 1
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step([Batch(image, (0,), None, ("",))], number)
            seconds[name].append(time.process_time() - start)
            progress(f"{name}, round {number}")
    timed = {name: values[1:] for name, values in seconds.items()}  # the first makes optimizer states, fills caches
    peaks = _predicted(settings, progress)
    return [
        {
            "variant": variant.name,
            "is_ours": variant.is_ours,
            "grid": list(grid),
            "peak_allocated_bytes": peaks[variant.name]["peak_allocated_bytes"],
            "seconds": round(statistics.median(timed[variant.name]), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(timed[variant.name], timed[STOCK], strict=True)), 3),
        }
        for variant in VARIANTS
    ]


def _predicted(settings: Settings, progress: Progress, has_reference: bool = False) -> dict[str, Row]:
    """Return peak bytes and FLOPs of each variant's step by name."""
    with Predictor() as predictor, _fresh_processes() as processes:
        asked: dict[str, Future[Any]] = (
            {REFERENCE: processes.submit(_track_reference, settings)} if has_reference else {}
        )
        for variant in VARIANTS:
            changed = settings.with_overrides(variant.changes)
            asked[variant.name] = (
                processes.submit(_track_matrix, changed)
                if variant.has_matrix
                else predictor.submit(changed, "autoencoder")
            )
        rows = {}
        for name, future in asked.items():
            answer = future.result()
            values = answer if isinstance(answer, dict) else answer.to_json()
            rows[name] = {
                "peak_allocated_bytes": values["peak_allocated_bytes"],
                "host_bytes": values["host_bytes"],
                "flops": values["flops"]["total"],
            }
            progress(f"{name}, peak")
    return rows


def default_attention_peak(settings: Settings) -> Row:
    """Return peak and FLOPs of the step with MONAI's default attention, the N x N matrix."""
    with _fresh_processes() as processes:
        return processes.submit(_track_matrix, settings).result()


def _fresh_processes() -> ProcessPoolExecutor:
    """Return processes for what no config can express: a prediction installs autocast rules that stay."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def _track_matrix(settings: Settings) -> Row:
    """Track the step that training makes, with MONAI's default attention."""
    from memory.predict.step import build_step, track_step

    def build(*question: Any) -> Any:
        step = build_step(*question)
        use_matrix_attention(step.networks_on_device["autoencoder"])
        return step

    return _row(track_step(settings, "autoencoder", build=build))


def _track_reference(settings: Settings) -> Row:
    """Track one step of the 3d_ldm-style loop; a first step makes the optimizers' states."""
    import torch

    from evaluation.benchmarks.reference_loop import ReferenceLoop
    from memory.predict.emulation import measure_peak

    def run(tracker: Any) -> None:
        loop = ReferenceLoop(settings)
        for network in (loop.autoencoder, loop.discriminator):
            tracker.adopt([*network.parameters(), *network.buffers()], "parameters")
        images = torch.zeros(1, 1, *settings.training_grid)
        loop.step(images)
        tracker.reset()
        loop.step(images)

    return _row(measure_peak(run))


def _row(tracker: Any) -> Row:
    from memory.predict.records import total_flops

    total = total_flops(tracker.flops)
    return {"peak_allocated_bytes": tracker.peak["device"], "host_bytes": 0, "flops": {"total": total}}
