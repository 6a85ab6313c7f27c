"""Predict a run in the background, announce the result before the first step, and calibrate by full steps."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace

import psutil
import torch

from memory.kernels.gpus import Gpu, chosen_gpu, find_gpu
from memory.ladder.text import as_overrides
from memory.ladder.walk import next_same_mathematics_rung
from memory.predict.prediction import Prediction, PredictionError, Predictor, Stage
from memory.predict.text import CPU_TIME, describe_time, gib
from memory.watch.calibration import corrected, record, record_time
from memory.watch.readings import MemoryReadings, device_bytes
from models.lean.norm.operators import uses_triton
from settings import Settings

log = logging.getLogger(__name__)


class BackgroundPrediction:
    """A prediction that runs in a worker while the data are prepared, for the device that the settings name.

    Create it early, call `announce` before the first step and `close` at the end. A failed prediction never stops
    training. gpu_name: the card that the user named, if any. without_triton: as in `Predictor`.
    """

    def __init__(self, settings: Settings, stage: Stage, gpu_name: str | None = None, without_triton: int = 0) -> None:
        self.settings, self.stage, self._gpu_name = settings, stage, gpu_name
        self._predictor: Predictor | None = Predictor(without_triton=without_triton)
        self._future: Future[Prediction] = self._predictor.submit(settings, stage)
        self._result: Prediction | None = None

    def result(self, timeout: float | None = 120.0) -> Prediction | None:
        """Return the prediction, waiting at most `timeout` seconds for it; None if it failed or took too long."""
        if self._result is None and self._predictor is not None:
            try:
                self._result = corrected(self._future.result(timeout), self._gpu_name)
            except (PredictionError, TimeoutError) as error:
                log.warning("memory: no prediction (%s)", str(error) or "it took too long")
        return self._result

    def announce(self, device: torch.device, num_volumes: tuple[int, int], num_processes: int) -> Prediction | None:
        """Log the predicted peak, time and memory of the device; warn and name the next rung if it will not fit.

        `num_volumes` says how many volumes train and how many are held out, which decides how long a run takes.
        """
        prediction = self._of_volumes(num_volumes)
        if prediction is not None:
            _announce(prediction, self.settings, self.stage, device_bytes(device), num_processes)
            if prediction.is_for_gpu:
                log.info("%s", describe_time(prediction, card_of(device), num_processes, self._max_hours))
        return prediction

    def announce_for_gpu(self, num_volumes: tuple[int, int], num_processes: int) -> None:
        """Log what a run needs on a card that this machine need not have."""
        prediction = self._of_volumes(num_volumes)
        if prediction is not None:
            log.info("memory: on a GPU %s", _needs(prediction, num_processes))
            text = describe_time(prediction, chosen_gpu(self._gpu_name), num_processes, self._max_hours)
            if self._gpu_name is None:
                text = text.replace(":", " (--gpu NAME for another):", 1)
            log.info("%s", text)
            for text in prediction.warnings:
                log.warning("memory: %s", text)

    def _of_volumes(self, num_volumes: tuple[int, int]) -> Prediction | None:
        prediction = self.result()
        self.close()
        if prediction is None or not any(num_volumes):
            return prediction
        return replace(prediction, num_volumes=list(num_volumes))

    @property
    def _max_hours(self) -> float | None:
        s = self.settings
        return (s.autoencoder if self.stage == "autoencoder" else s.ldm).training.max_hours

    def close(self) -> None:
        """Stop the worker."""
        if self._predictor is not None:
            self._predictor.close()
            self._predictor = None


def card_of(device: torch.device) -> Gpu:
    """Return the card that a run uses, or, if the table does not know it, the one that estimates are made for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return find_gpu(name) or chosen_gpu(None)


def without_triton(device: torch.device) -> int:
    """Return the memory of a GPU that cannot run Triton; 0 for other devices."""
    is_plain = device.type == "cpu" or uses_triton(device)
    return 0 if is_plain else torch.cuda.get_device_properties(device).total_memory


def _needs(p: Prediction, num_processes: int, resident: int = 0) -> str:
    """Describe what a run needs; `resident`: what its process had in memory before it, on a CPU."""
    needed = gib(p.needed_bytes(num_processes) + resident)
    beside = f", {gib(resident)} of it Python and its libraries" if resident else ""
    return (
        f"the run needs {needed}{beside}, most in its {p.needing_phase}; a step has "
        f"{gib(p.peak_allocated_bytes)} in tensors, peak in: {p.phase}; a real step may need {p.margin:.0%} more"
    )


def _announce(prediction: Prediction, settings: Settings, stage: Stage, available: int, num_processes: int) -> None:
    where, time, resident = "the device", "", 0
    if not prediction.is_for_gpu:
        where, time, resident = "this machine", f". {CPU_TIME}", psutil.Process().memory_info().rss
    log.info("memory: %s has %s; on it %s%s", where, gib(available), _needs(prediction, num_processes, resident), time)
    for text in prediction.warnings:
        log.warning("memory: %s", text)
    if prediction.needed_bytes(num_processes) + resident <= available:
        return
    rung = next_same_mathematics_rung(settings, stage)
    advice = f"; next rung: {rung.name} ({as_overrides(rung)})" if rung is not None else ""
    log.warning("memory: this will probably not fit%s; scripts/oom_ladder.py shows all rungs", advice)


def record_full_step(prediction: Prediction, readings: MemoryReadings) -> None:
    """Calibrate later predictions on this machine by a full step; call this once, right after that step."""
    ratio = record(prediction, readings.measured_bytes())
    if ratio is not None:
        log.info("memory: a full step allocated %.2f times its prediction; later predictions know that", ratio)


def record_step_time(prediction: Prediction, seconds: float, device: torch.device) -> None:
    """Calibrate later times on this machine by the mean time of full steps."""
    least = replace(prediction, time_correction=1.0).seconds_per_step(card_of(device))
    ratio = record_time(prediction, seconds, least)
    if ratio is not None:
        log.info("time: an update takes %.3g s, %.1f times its least; later predictions know that", seconds, ratio)
