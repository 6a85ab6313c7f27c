"""Everything a training run does about memory, in one object, so that the train script shows only the algorithm."""

from __future__ import annotations

import gc
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from memory.kernels.gpus import chosen_gpu
from memory.predict.prediction import MIB, Prediction, Stage, fullest_step
from memory.watch.announcement import BackgroundPrediction, card_of, without_triton
from memory.watch.calibration import record, record_time
from memory.watch.diagnosis import (
    Failure,
    TrainingOutOfMemoryError,
    is_out_of_memory,
    report_out_of_memory,
    settings_of_next_rung,
)
from memory.watch.readings import MemoryReadings
from runtime.files import write_text
from runtime.observer import current_phase, phase
from runtime.processes import Process, number_of_processes
from settings import Settings

log = logging.getLogger(__name__)
OnOom = Literal["stop", "next-rung"]
TINY_ACTIVATION_BYTES, SMALL_ACTIVATION_BYTES, SHORT_RUN_BYTES = 1 * MIB, 16 * MIB, 512 * MIB
"""The size of the largest activation, and its sum over the micro-batches of a run."""
TIMED_STEPS = 50  # without a pause between them, so that kernels still queued at the end hardly count


class MemoryWatch:
    """Predict in the background, read memory while training runs, and report when memory runs out.

    Create it before preparing the data, call `announce` before the first step, train inside `guard`, and call `read`
    for the log. A dry run also predicts for the card `gpu_name`, or, without a GPU here, for a common one.
    """

    def __init__(
        self, settings: Settings, stage: Stage, process: Process, is_dry_run: bool = False, gpu_name: str | None = None
    ) -> None:
        self.stage, self.process = stage, process
        # Predictions and rungs of a CPU follow other rules, so the settings name the device.
        self.settings = settings.with_overrides({"device.type": process.device.type})
        self.prediction: Prediction | None = None
        self.readings = MemoryReadings(process.device)
        self._full_steps = 0
        self._ends: list[float] = []
        self._is_timed = False
        self._pending: BackgroundPrediction | None = None
        self._for_gpu: BackgroundPrediction | None = None
        if process.is_rank_zero and not (process.device.type == "cpu" and is_tiny(settings, stage)):
            self._pending = BackgroundPrediction(self.settings, stage, without_triton=without_triton(process.device))
        has_no_gpu = settings.device.type == "auto" and process.device.type == "cpu"
        if process.is_rank_zero and is_dry_run and (gpu_name is not None or has_no_gpu):
            on_gpu, card = settings.with_overrides({"device.type": "cuda"}), chosen_gpu(gpu_name)
            self._for_gpu = BackgroundPrediction(on_gpu, stage, gpu_name, card.without_triton)

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *error: Any) -> None:
        for pending in (self._pending, self._for_gpu):
            if pending is not None:
                pending.close()

    def announce(self, num_train: int = 0, num_held_out: int = 0) -> None:
        """Log the predicted peak and time of a run on so many volumes; name the next rung if it will not fit."""
        num_volumes, num_processes = (num_train, num_held_out), self.process.world_size
        if self._for_gpu is not None:
            self._for_gpu.announce_for_gpu(num_volumes, num_processes)
        if self._pending is not None:
            self.prediction = self._pending.announce(self.process.device, num_volumes, num_processes)
        elif self.process.is_rank_zero:
            log.info(
                "on this CPU, memory and time are not predicted for so small a run; the time left is measured on its "
                "first steps"
            )

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
            failure = Failure(error, current_phase(), step, saved)
            raise report_out_of_memory(
                failure, folder, self.settings, self.stage, self.prediction, self.process.world_size
            ) from error
        self._calibrate(is_full)

    def _calibrate(self, is_full: bool) -> None:
        """Record the second full step, which has every optimizer state, and the time of the steps after it.

        Not on the CPU, whose resident memory also contains the data.
        """
        self._full_steps += is_full
        if self.prediction is None or self.process.device.type != "cuda":
            return
        if is_full and self._full_steps == 2:
            ratio = record(self.prediction, self.readings.measured_bytes())
            if ratio is not None:
                log.info("memory: a full step used %.2f x its prediction; later predictions are scaled by this", ratio)
        self._ends = [*self._ends, time.perf_counter()] if is_full else []
        if len(self._ends) == TIMED_STEPS + 1 and not self._is_timed:
            self._is_timed = True
            self._record_time((self._ends[-1] - self._ends[0]) / TIMED_STEPS)
        self._ends = self._ends[-TIMED_STEPS:]

    def _record_time(self, seconds: float) -> None:
        assert self.prediction is not None, "times are compared with a prediction"
        predicted = replace(self.prediction, time_correction=1.0).seconds_per_step(card_of(self.process.device))
        ratio = record_time(self.prediction, seconds, predicted)
        if ratio is not None:
            text = "time: an update takes %.3g s, %.1f x its prediction; later predictions are scaled by this"
            log.info(text, seconds, ratio)

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
            changed = settings_of_next_rung(settings, stage, error.saved)
            if changed is None:
                raise
            log.warning("%s", error)
            settings = changed
        # Outside the except block the error is released, and with it the tensors that its frames hold.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_tiny(settings: Settings, stage: Stage) -> bool:
    """Return whether a run is too small and too short for a prediction to be worth its time."""
    channels, grid = settings.autoencoder.num_channels[0], settings.training_grid
    if stage == "ldm":
        channels, grid = settings.ldm.unet.num_channels[0], settings.latent_shape[1:]
    training = settings.training_of(stage)
    activation = 8 * training.batch_size * channels * math.prod(grid)
    is_short = activation * training.max_steps * training.gradient_accumulation_steps < SHORT_RUN_BYTES
    return activation < TINY_ACTIVATION_BYTES or (activation < SMALL_ACTIVATION_BYTES and is_short)
