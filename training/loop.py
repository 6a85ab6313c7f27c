"""The loop of both stages: step, log, save, validate, until the last step or until the run is asked to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from settings import TrainingSettings
from storage.run_folder import RunFolder
from training.recorder import Recorder
from training.step import TrainingStep
from training.stop_signal import StopSignal

log = logging.getLogger(__name__)


class Watch(Protocol):
    """What the loop needs to know of memory."""

    def guard(self, folder: Path, step: int, activity: str, saved: int) -> AbstractContextManager[None]:
        """Turn running out of memory inside into a report."""

    def read(self) -> dict[str, float]:
        """Return the readings since the last call."""


def run_loop(
    step: TrainingStep,
    batches: Iterable[Sequence[Any]],
    first_step: int,
    run: RunFolder,
    watch: Watch,
    save: Callable[[int], None],
    validate: Callable[[Recorder, int], None],
) -> bool:
    """Train on the batches of the steps from `first_step` on; return False when asked to stop before the last step.

    Every validation comes after a checkpoint of its step. One that was cut short, or left out because the run was asked
    to stop, is made up for before the first step.
    """
    training, process, saved = step.training, step.process, first_step

    def validation(done: int) -> None:
        with watch.guard(run.path, done - 1, "validation", saved), recorder.paused():
            validate(recorder, done)

    with Recorder(run, step.stage, first_step, training.max_steps, process) as recorder, StopSignal() as stop:
        if _is_validated_at(first_step, training) and not process.from_first(recorder.has_validation(first_step)):
            validation(first_step)

        for done, micro_batches in enumerate(batches, first_step + 1):
            with watch.guard(run.path, done - 1, "training", saved):
                recorder.add(step(micro_batches, done - 1), training.samples_per_rank)
            is_end = done == training.max_steps
            is_validated = _is_validated_at(done, training)
            must_stop = process.any(bool(stop))
            is_saved = done % training.save_every == 0 or is_validated or must_stop
            is_logged = done % training.log_every == 0 or is_end

            if is_logged or is_saved:
                step.guard.raise_if_bad(saved)
            if is_logged:
                recorder.log(done, **watch.read())

            # Before validation: whatever happens there, no step is made twice.
            if is_saved:
                with recorder.paused():
                    save(done)
                saved = done

            # Without validation: the time until the process is killed belongs to the checkpoint.
            if must_stop and not is_end:
                log.warning("stopped after step %d; the same command goes on from there", done)
                return False

            if is_validated:
                validation(done)
    return True


def _is_validated_at(done: int, training: TrainingSettings) -> bool:
    return done > 0 and (done % training.validate_every == 0 or done >= training.max_steps)
