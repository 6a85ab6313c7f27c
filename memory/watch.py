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

from memory.diagnosis import (
    BackgroundPrediction,
    TrainingOutOfMemoryError,
    is_out_of_memory,
    record_first_step,
    report_out_of_memory,
    settings_of_next_rung,
)
from memory.prediction import MIB, Prediction, Stage
from memory.readings import MemoryReadings
from memory.run_record import write_memory_record
from settings import Settings
from training.distributed import Process
from training.phases import current_phase

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
    def guard(self, folder: Path, step: int) -> Iterator[None]:
        """Turn running out of memory inside into `TrainingOutOfMemoryError`, with a report in the run's folder."""
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise report_out_of_memory(
                error, folder, self.settings, self.stage, current_phase(), step, self.prediction
            ) from error
        if self._is_first_step:
            self._is_first_step = False
            if self.process.device.type == "cuda":
                # On the CPU the resident memory also holds the data's, so it corrects nothing.
                record_first_step(self.prediction, self.readings)

    def read(self) -> dict[str, float]:
        """Return the readings since the last call, in GiB, by the names of the metrics."""
        return self.readings.read()


def train_with_rungs(train: Callable[[Settings], int], settings: Settings, stage: Stage, on_oom: OnOom) -> int:
    """Call `train(settings)`; with on_oom="next-rung" call it again with the next rung whenever memory runs out.

    `train` resumes from its last checkpoint, so only the steps since then are done twice. Several processes cannot
    decide this together: there the report says the rung and the user starts again.
    """
    while True:
        try:
            return train(settings)
        except TrainingOutOfMemoryError as error:
            several = torch.distributed.is_available() and torch.distributed.is_initialized()
            changed = None if on_oom == "stop" or several else settings_of_next_rung(settings, stage)
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
