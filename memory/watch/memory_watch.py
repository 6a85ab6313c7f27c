"""The memory side of a training run in one object, so that the training script stays the algorithm."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from memory.predict.prediction import MIB, Prediction, Stage
from memory.watch.diagnosis import (
    BackgroundPrediction,
    TrainingOutOfMemoryError,
    is_out_of_memory,
    record_first_step,
    report_out_of_memory,
    settings_of_next_rung,
)
from memory.watch.readings import MemoryReadings
from memory.watch.run_record import write_memory_record
from runtime.phases import current_phase, phase
from runtime.processes import Process, number_of_processes
from settings import Settings

log = logging.getLogger(__name__)
OnOom = Literal["stop", "next-rung"]
TINY_ACTIVATION_BYTES = 16 * MIB


class MemoryWatch:
    """Predicts in the background, reads while training runs, and turns running out of memory into a report.

    Make it before the data are prepared, `announce` before the first step, work inside `guard`, and `read` for the log.
    """

    def __init__(self, settings: Settings, stage: Stage, process: Process) -> None:
        self.settings, self.stage, self.process = settings, stage, process
        self.prediction: Prediction | None = None
        self.readings = MemoryReadings(process.device)
        self._is_first_step = True
        self._pending: BackgroundPrediction | None = None
        if process.is_first and not (process.device.type == "cpu" and is_tiny(settings, stage)):
            self._pending = BackgroundPrediction(_for_device(settings, process.device), stage)

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pending is not None:
            self._pending.close()

    def announce(self) -> None:
        """Log the predicted peak against what the device has, with the next rung when it will not fit."""
        if self._pending is not None:
            self.prediction = self._pending.announce(self.process.device)

    def record(self, folder: Path) -> None:
        """Keep the prediction and the place on the ladder with the run, for its report."""
        if self.process.is_first:
            write_memory_record(folder, self.settings, self.stage, self.prediction)

    @contextmanager
    def guard(self, folder: Path, step: int, activity: str = "training", saved: int = 0) -> Iterator[None]:
        """Turn running out of memory inside into `TrainingOutOfMemoryError`, with a report in the run's folder.

        `activity` is the phase's name where nothing inside names a finer one, `saved` the step of the last checkpoint,
        0 when there is none.
        """
        try:
            with phase(activity):
                yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise report_out_of_memory(
                error,
                folder,
                self.settings,
                self.stage,
                current_phase(),
                step,
                self.prediction,
                saved,
                self.process.world_size,
            ) from error
        # After a validation the allocator holds what that needed. On the CPU the resident memory also holds the data's.
        if self._is_first_step and activity == "training" and self.process.device.type == "cuda":
            record_first_step(self.prediction, self.readings)
        self._is_first_step = False

    def read(self) -> dict[str, float]:
        """Return the readings since the last call, in GiB, by the names of the metrics."""
        return self.readings.read()


def train_with_rungs(train: Callable[[Settings], int], settings: Settings, stage: Stage, on_oom: OnOom) -> int:
    """Call `train(settings)`; with on_oom="next-rung" call it again with the next rung whenever memory runs out.

    `train` resumes from its last checkpoint, so only the steps since then are done twice. Several processes cannot
    decide this together, because those with memory left wait for the one that failed: all of them end.
    """
    while True:
        try:
            return train(settings)
        except TrainingOutOfMemoryError as error:
            # By what the launcher says: the group of processes is gone by now.
            if on_oom == "stop" or number_of_processes() > 1:
                raise
            changed = settings_of_next_rung(settings, stage, error.saved)
            if changed is None:
                raise
            log.warning("%s", error)
            settings = changed
        # Here the error, and with it all tensors in its frames, is gone.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_tiny(settings: Settings, stage: Stage) -> bool:
    """Return whether the largest activation is so small that predicting takes longer than it can help."""
    if stage == "autoencoder":
        channels, grid = 2 * settings.autoencoder.num_channels[0], settings.training_grid
        batch = settings.autoencoder.training.batch_size
    else:
        channels, grid = 2 * settings.ldm.unet.num_channels[0], settings.latent_shape[1:]
        batch = settings.ldm.training.batch_size
    return 4 * batch * channels * math.prod(grid) < TINY_ACTIVATION_BYTES


def _for_device(settings: Settings, device: torch.device) -> Settings:
    """Return settings whose device is decided: a prediction for a CPU follows the CPU's rules."""
    return settings.with_overrides({"device.type": device.type})
