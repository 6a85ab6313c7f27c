"""Predict a run in the background, and announce the result before the first step."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace

import psutil
import torch

from memory.kernels.gpus import Gpu, chosen_gpu, known_or_stand_in
from memory.ladder.text import as_overrides
from memory.ladder.walk import next_same_mathematics_rung
from memory.predict.prediction import Prediction, PredictionError, Predictor, Stage
from memory.predict.text import describe_time, gib
from memory.watch.calibration import corrected
from memory.watch.readings import device_bytes
from models.lean.norm.operators import uses_triton
from settings import Settings

log = logging.getLogger(__name__)
TIMEOUT_SECONDS = 120.0


class BackgroundPrediction:
    """A prediction that runs in a worker while the data are prepared, for the device that the settings name.

    Create it early, call `announce` or `announce_for_gpu` before the first step, and `close` at the end. A failed
    prediction never stops training. gpu_name: the card that the user named, if any. without_triton: as in `Predictor`.
    """

    def __init__(self, settings: Settings, stage: Stage, gpu_name: str | None = None, without_triton: int = 0) -> None:
        self.settings, self.stage, self._gpu_name = settings, stage, gpu_name
        self._predictor = Predictor(without_triton=without_triton)
        self._future: Future[Prediction] = self._predictor.submit(settings, stage)

    def announce(self, device: torch.device, num_volumes: tuple[int, int], num_processes: int) -> Prediction | None:
        """Log the predicted peak, time and memory of the device; warn and name the next rung if it will not fit.

        `num_volumes` says how many volumes train and how many are held out, which decides how long a run takes.
        """
        prediction = self._result(num_volumes)
        if prediction is not None:
            _announce(prediction, self.settings, self.stage, device_bytes(device), num_processes)
            self._announce_time(prediction, card_of(device), num_processes)
        return prediction

    def announce_for_gpu(self, num_volumes: tuple[int, int], num_processes: int) -> None:
        """Log what a run needs on a card that this machine need not have."""
        prediction = self._result(num_volumes)
        if prediction is not None:
            log.info("memory: on a GPU: predicted peak %s", _peaks(prediction, num_processes))
            self._announce_time(prediction, chosen_gpu(self._gpu_name), num_processes)
            if self._gpu_name is None:
                log.info("--gpu NAME predicts the time on another GPU")
            _warn(prediction)

    def _announce_time(self, prediction: Prediction, card: Gpu, num_processes: int) -> None:
        max_hours = self.settings.training_of(self.stage).max_hours
        log.info("%s", describe_time(prediction, card, num_processes, max_hours))

    def _result(self, num_volumes: tuple[int, int]) -> Prediction | None:
        """Return the prediction for so many volumes; None if it failed or took too long."""
        try:
            prediction = corrected(self._future.result(TIMEOUT_SECONDS), self._gpu_name)
        except (PredictionError, TimeoutError) as error:
            log.warning("memory: no prediction (%s)", str(error) or "it took too long")
            return None
        finally:
            self.close()
        return replace(prediction, num_volumes=list(num_volumes)) if any(num_volumes) else prediction

    def close(self) -> None:
        """Stop the worker."""
        self._predictor.close()


def card_of(device: torch.device) -> Gpu:
    """Return the card that a run uses, or what stands in for it; without a GPU the one that estimates are made for."""
    return known_or_stand_in(torch.cuda.get_device_name(device)) if device.type == "cuda" else chosen_gpu(None)


def without_triton(device: torch.device) -> int:
    """Return the memory of a GPU that cannot run Triton; 0 for other devices."""
    is_plain = device.type == "cpu" or uses_triton(device)
    return 0 if is_plain else torch.cuda.get_device_properties(device).total_memory


def _peaks(p: Prediction, num_processes: int, resident: int = 0, of: str = "") -> str:
    """Describe what a run needs; `resident`: what its process had in memory before it, on a CPU."""
    needed = gib(p.needed_bytes(num_processes) + resident)
    python = f", {gib(resident)} of it Python and its libraries" if resident else ""
    return (
        f"{needed}{of} (in {p.needing_phase}){python}; tensors of a training step {gib(p.peak_allocated_bytes)} (in "
        f"{p.phase}); allow {p.margin:.0%} margin"
    )


def _warn(prediction: Prediction) -> None:
    for text in prediction.warnings:
        log.warning("memory: %s", text)


def _announce(prediction: Prediction, settings: Settings, stage: Stage, available: int, num_processes: int) -> None:
    resident = 0 if prediction.is_for_gpu else psutil.Process().memory_info().rss
    log.info("memory: predicted peak %s", _peaks(prediction, num_processes, resident, f" of {gib(available)}"))
    _warn(prediction)
    if prediction.needed_bytes(num_processes) + resident <= available:
        return
    rung = next_same_mathematics_rung(settings, stage)
    advice = f"; next rung: {rung.name} ({as_overrides(rung)})" if rung is not None else ""
    log.warning("memory: this will probably not fit%s; scripts/oom_ladder.py shows all rungs", advice)
