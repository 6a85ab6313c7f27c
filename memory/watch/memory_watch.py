"""Everything a training run does about memory, in one object, so that the train script shows only the algorithm."""

from __future__ import annotations

import difflib
import errno
import gc
import json
import logging
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from memory.kernels.gpus import Gpu, chosen_gpu, known_or_stand_in
from memory.ladder.rungs import Rung
from memory.ladder.walk import as_overrides, next_same_mathematics_rung, promise
from memory.predict.prediction import GIB, MIB, Prediction, PredictionError, Predictor, Stage, fullest_step
from memory.predict.text import describe_time, gib
from memory.watch.calibration import corrected, record
from models.lean.norm.operators import uses_triton
from runtime.cli import OUT_OF_MEMORY
from runtime.files import write_text
from runtime.host_memory import available_host_bytes
from runtime.observer import current_phase, phase
from runtime.processes import Process, number_of_processes
from settings import Settings, UserError, dump_yaml
from training.guard import checkpoint_state

log = logging.getLogger(__name__)
OnOom = Literal["stop", "next-rung"]
REPORT = "oom_report.json"
PREDICTION_TIMEOUT = 120.0
TINY_ACTIVATION_BYTES, SMALL_ACTIVATION_BYTES, SHORT_RUN_BYTES = 1 * MIB, 16 * MIB, 512 * MIB
"""The size of the largest activation, and its sum over the micro-batches of a run."""
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TIMED_STEPS = 50  # without a pause between them, so that kernels still queued at the end hardly count
# Messages of torch's CPU allocator, oneDNN and the C++ runtime.
_CPU_MESSAGES = (
    *("can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc", "bad allocation"),
    *("could not create a memory", "out of memory", "unable to mmap"),
)


class TrainingOutOfMemoryError(UserError):
    """Training ran out of memory; the text says what to do. `saved` is the step of the last checkpoint, or 0."""

    exit_code = OUT_OF_MEMORY

    def __init__(self, text: str, saved: int = 0) -> None:
        super().__init__(text)
        self.saved = saved


class PendingPrediction:
    """A prediction that runs in a worker while the data are prepared; a failed one never stops training."""

    def __init__(self, settings: Settings, stage: Stage, gpu_name: str | None, without_triton: int) -> None:
        self._gpu_name = gpu_name
        self._predictor = Predictor(without_triton=without_triton)
        self._future = self._predictor.submit(settings, stage)

    def result(self, num_volumes: tuple[int, int]) -> Prediction | None:
        """Return the prediction for so many training and held-out volumes; None if it failed or took too long."""
        try:
            prediction = corrected(self._future.result(PREDICTION_TIMEOUT), self._gpu_name)
        except (PredictionError, TimeoutError) as error:
            log.warning("memory: no prediction (%s)", str(error) or "it took too long")
            return None
        finally:
            self.close()
        return replace(prediction, num_volumes=list(num_volumes)) if any(num_volumes) else prediction

    def close(self) -> None:
        """Stop the worker."""
        self._predictor.close()


class MemoryWatch:
    """Predict in the background, read memory while training runs, and report when memory runs out.

    Create it before preparing the data, call `announce` before the first step, train inside `guard`, and call `read`
    for the log. A dry run also predicts for the card `gpu_name`, or, without a GPU here, for a common one.
    """

    def __init__(
        self, settings: Settings, stage: Stage, process: Process, is_dry_run: bool = False, gpu_name: str | None = None
    ) -> None:
        self.stage, self.process, self._gpu_name = stage, process, gpu_name
        # Predictions and rungs of a CPU follow other rules, so the settings name the device.
        self.settings = settings.with_overrides({"device.type": process.device.type})
        self.prediction: Prediction | None = None
        self.readings = MemoryReadings(process.device)
        self._full_steps = 0
        self._ends: list[float] = []
        self._is_timed = False
        self.pending: PendingPrediction | None = None
        self.pending_for_gpu: PendingPrediction | None = None
        if process.is_rank_zero and not (process.device.type == "cpu" and is_tiny(settings, stage)):
            self.pending = PendingPrediction(self.settings, stage, None, without_triton(process.device))
        has_no_gpu = settings.device.type == "auto" and process.device.type == "cpu"
        if process.is_rank_zero and is_dry_run and (gpu_name is not None or has_no_gpu):
            on_gpu, card = settings.with_overrides({"device.type": "cuda"}), chosen_gpu(gpu_name)
            self.pending_for_gpu = PendingPrediction(on_gpu, stage, gpu_name, card.without_triton)

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *error: Any) -> None:
        for pending in (self.pending, self.pending_for_gpu):
            if pending is not None:
                pending.close()

    def announce(self, num_train: int = 0, num_held_out: int = 0) -> None:
        """Log the predicted peak and time of a run on so many volumes; name the next rung if it will not fit."""
        volumes = (num_train, num_held_out)
        if self.pending_for_gpu is not None and (on_gpu := self.pending_for_gpu.result(volumes)) is not None:
            self._announce(on_gpu, chosen_gpu(self._gpu_name), "on a GPU: ")
            if self._gpu_name is None:
                log.info("--gpu NAME predicts the time on another GPU")
        if self.pending is not None:
            self.prediction = self.pending.result(volumes)
            if self.prediction is not None:
                device = self.process.device
                self._announce(self.prediction, card_of(device), available=device_bytes(device))
        elif self.process.is_rank_zero:
            log.info(
                "on this CPU, memory and time are not predicted for so small a run; the time left is measured on its "
                "first steps"
            )

    def _announce(self, p: Prediction, card: Gpu, where: str = "", available: int | None = None) -> None:
        """Log what a run needs; on a CPU also what its process has in memory already, which must fit too."""
        num_processes, resident, of, python = self.process.world_size, 0, "", ""
        if available is not None:
            of = f" of {gib(available)}"
            if not p.is_for_gpu:
                resident = psutil.Process().memory_info().rss
                python = f", {gib(resident)} of it Python and its libraries"
        needed = p.needed_bytes(num_processes) + resident
        log.info(
            f"memory: {where}predicted peak {gib(needed)}{of} (in {p.needing_phase}){python}; tensors of a training "
            f"step {gib(p.peak_allocated_bytes)} (in {p.phase}); allow {p.margin:.0%} margin"
        )
        for text in p.warnings:
            log.warning("memory: %s", text)
        if available is not None and needed > available:
            rung = next_same_mathematics_rung(self.settings, self.stage)
            advice = f"; next rung: {_rung_text(rung)}" if rung is not None else ""
            log.warning("memory: this will probably not fit%s; scripts/oom_ladder.py shows all rungs", advice)
        max_hours = self.settings.training_of(self.stage).max_hours
        log.info("%s", describe_time(p, card, num_processes, max_hours))

    def record(self, folder: Path) -> None:
        """Write the prediction to the run folder, for its report."""
        if self.process.is_rank_zero:
            prediction = self.prediction.to_json() if self.prediction is not None else None
            write_text(folder / f"memory_{self.stage}.json", json.dumps({"prediction": prediction}, indent=1) + "\n")

    @contextmanager
    def guard(self, folder: Path, step: int, activity: str = "training", saved: int = 0) -> Iterator[None]:
        """Turn out-of-memory errors inside the block into `TrainingOutOfMemoryError`, with a report in the run folder.

        `activity` names the phase until the code inside names a finer one; `saved` is the step of the last checkpoint,
        or 0.
        """
        is_full = activity == "training" and step >= fullest_step(self.settings, self.stage)
        if is_full and self._full_steps == 1:
            self.readings.start_step()
        try:
            with phase(activity):
                yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._report(error, folder, step, saved) from error
        self._calibrate(is_full)

    def _report(self, error: BaseException, folder: Path, step: int, saved: int) -> TrainingOutOfMemoryError:
        """Write `oom_report.json` and return the error to raise; both give phase, step, breakdown and next rung."""
        rung, p, failed_in = next_same_mathematics_rung(self.settings, self.stage), self.prediction, current_phase()
        text = f"step {step + 1}, {failed_in}: out of memory; {checkpoint_state(saved)}"
        report: dict[str, Any] = {
            "stage": self.stage,
            "phase": failed_in,
            "step": step,
            "last_checkpoint": saved or None,
            "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "breakdown": p and p.breakdown,
            "largest": p and p.largest,
            "predicted_peak_bytes": p and p.required_bytes,
            "readings": self.readings.read(),
            "next_rung": None,
        }
        if p is not None and p.breakdown:
            parts = sorted(p.breakdown.items(), key=lambda part: -part[1])
            text += "\n  at the predicted peak: " + ", ".join(f"{name} {gib(n)}" for name, n in parts if n)
        if rung is None:
            text += "\n  no rung with the same mathematics is left; scripts/oom_ladder.py shows those that change it"
        else:
            before, after = (dump_yaml(settings).splitlines() for settings in (self.settings, rung.settings))
            diff = [*difflib.unified_diff(before, after, "config.yaml", "next rung", lineterm="", n=1)]
            kind = promise(rung.same_mathematics)
            report["next_rung"] = {"name": rung.name, "promise": kind, "changes": rung.changes}
            report["next_rung"]["yaml_diff"] = "\n".join(diff)
            alternative = "--on-oom next-rung does this automatically, but only for a single process"
            if self.process.world_size == 1:
                alternative = "or add --on-oom next-rung"
            text += "\n    ".join([f"\n  next rung ({kind}): {rung.name}", *diff])
            text += f"\n  make this change to the config and run the same command again; {alternative}"
        try:
            write_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
        except OSError as problem:
            log.warning("%s: cannot be written (%s)", folder / REPORT, problem)
        return TrainingOutOfMemoryError(f"{text}\n  details: {folder / REPORT}", saved)

    def _calibrate(self, is_full: bool) -> None:
        """Record the second full step, which has every optimizer state, and the time of the steps after it.

        Not on the CPU, whose resident memory also contains the data.
        """
        self._full_steps += is_full
        if self.prediction is None or self.process.device.type != "cuda":
            return
        if is_full and self._full_steps == 2:
            measured = self.readings.step_peak_bytes()
            ratio = record(self.prediction, "memory", measured, self.prediction.peak_allocated_bytes)
            if ratio is not None:
                log.info("memory: a full step used %.2f x its prediction; later predictions are scaled by this", ratio)
        self._ends = [*self._ends, time.perf_counter()] if is_full else []
        if len(self._ends) == TIMED_STEPS + 1 and not self._is_timed:
            self._is_timed = True
            seconds = (self._ends[-1] - self._ends[0]) / TIMED_STEPS
            predicted = replace(self.prediction, time_correction=1.0).seconds_per_step(card_of(self.process.device))
            ratio = record(self.prediction, "time", seconds, predicted)
            if ratio is not None:
                text = "time: an update takes %.3g s, %.1f x its prediction; later predictions are scaled by this"
                log.info(text, seconds, ratio)
        self._ends = self._ends[-TIMED_STEPS:]

    def read(self) -> dict[str, float]:
        """Return the readings since the last call, in GiB, by metric name."""
        return self.readings.read()


def train_with_rungs(train: Callable[[Settings], int], settings: Settings, stage: Stage, on_oom: OnOom) -> int:
    """Call `train(settings)`; with on_oom="next-rung", call it again with the next rung whenever memory runs out.

    `train` resumes from its last checkpoint, so only the steps since then are repeated. Several processes cannot do
    this, because the ranks that still have memory wait for the one that failed; all of them stop.
    """
    while True:
        try:
            return train(settings)
        except TrainingOutOfMemoryError as error:
            # Ask the launcher's variables, because the process group no longer exists.
            if on_oom == "stop" or number_of_processes() > 1:
                raise
            has_gpu = settings.device.type != "cpu" and torch.cuda.is_available()
            here = settings if has_gpu else settings.with_overrides({"device.type": "cpu"})
            rung = next_same_mathematics_rung(here, stage)
            if rung is None:
                raise
            how = "there is no checkpoint yet; starting again"
            if error.saved:
                how = f"resuming from the checkpoint of step {error.saved}"
            log.warning("memory: out of memory; %s with %s", how, _rung_text(rung))
            log.warning("%s", error)
            settings = settings.with_overrides(rung.changes)
        # Outside the except block the error is released, and with it the tensors that its frames hold.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _CPU_MESSAGES)


def is_tiny(settings: Settings, stage: Stage) -> bool:
    """Return whether a run is too small and too short for a prediction to be worth its time."""
    channels, grid = settings.autoencoder.num_channels[0], settings.training_grid
    if stage == "ldm":
        channels, grid = settings.ldm.unet.num_channels[0], settings.latent_shape[1:]
    training = settings.training_of(stage)
    activation = 8 * training.batch_size * channels * math.prod(grid)
    is_short = activation * training.max_steps * training.gradient_accumulation_steps < SHORT_RUN_BYTES
    return activation < TINY_ACTIVATION_BYTES or (activation < SMALL_ACTIVATION_BYTES and is_short)


def card_of(device: torch.device) -> Gpu:
    """Return the card that a run uses, or what stands in for it; without a GPU the one that estimates are made for."""
    return known_or_stand_in(torch.cuda.get_device_name(device)) if device.type == "cuda" else chosen_gpu(None)


def without_triton(device: torch.device) -> int:
    """Return the memory of a GPU that cannot run Triton; 0 for other devices."""
    is_plain = device.type == "cpu" or uses_triton(device)
    return 0 if is_plain else torch.cuda.get_device_properties(device).total_memory


def _rung_text(rung: Rung) -> str:
    return f"{rung.name} ({' '.join(as_overrides(rung.changes))})"


class MemoryReadings:
    """Readings of the training device: the allocator of a GPU, or the resident memory of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._earlier_peak = 0
        self._reset()

    def read(self) -> dict[str, float]:
        """Return the readings in GiB by metric name, and start a new interval for the peak."""
        if self.device.type == "cuda":
            values = {
                "memory_allocated_gib": torch.cuda.memory_allocated(self.device),
                "memory_reserved_gib": torch.cuda.memory_reserved(self.device),
                "memory_peak_gib": max(self._earlier_peak, self.step_peak_bytes()),
            }
        else:
            rss = psutil.Process().memory_info().rss
            values = {"host_memory_gib": rss, "host_memory_peak_gib": resident_peak_bytes()}
        self._reset()
        return {name: round(value / GIB, 4) for name, value in values.items()}

    def start_step(self) -> None:
        """Let `step_peak_bytes` count from here; the readings keep the peak from before."""
        if self.device.type == "cuda":
            self._earlier_peak = max(self._earlier_peak, self.step_peak_bytes())
            torch.cuda.reset_peak_memory_stats(self.device)

    def step_peak_bytes(self) -> int:
        """Return the peak allocated on the GPU since `start_step`, or the last reading if that was later."""
        return torch.cuda.max_memory_allocated(self.device)

    def _reset(self) -> None:
        self._earlier_peak = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_resident_peak()


def device_bytes(device: torch.device) -> int:
    """Return the memory of the GPU, or on a CPU the memory that this process can use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    available = available_host_bytes() + psutil.Process().memory_info().rss
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return available if limit == resource.RLIM_INFINITY else min(available, limit)


def resident_peak_bytes() -> int:
    """Return the peak resident memory of this process since the last reset, or since its start."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_resident_peak() -> bool:
    """Start a new interval for `resident_peak_bytes`; return whether the system allows it."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
