"""The training loop of both stages: step, log, save and validate until the last step or a stop signal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from runtime.files.run_folder import RunFolder
from settings import TrainingSettings
from training.finished_weights import BestWeights
from training.recording.progress import RunClock
from training.recording.recorder import Recorder
from training.recording.trackers import open_trackers
from training.step import TrainingStep
from training.stop_signal import StopSignal

log = logging.getLogger(__name__)

Preview = TypeVar("Preview")
"""What `validate` passes to `show`; the loop does not look at it."""


class Watch(Protocol):
    """The part of `memory.watch.MemoryWatch` that the loop uses."""

    def guard(self, folder: Path, step: int, activity: str, saved: int) -> AbstractContextManager[None]:
        """Report an out-of-memory error raised inside the block."""

    def read(self) -> dict[str, float]:
        """Return memory readings since the last call, by metric name."""


def run_loop(
    step: TrainingStep,
    batches: Iterable[Sequence[Any]],
    first_step: int,
    run: RunFolder,
    watch: Watch,
    save: Callable[[int], None],
    validate: Callable[[], tuple[dict[str, float], Preview]],
    show: Callable[[Recorder, int, dict[str, float], Preview], None],
) -> bool:
    """Train on `batches`, which start at `first_step`; return False when stopped by a signal before the last step.

    `save` gets the number of finished steps; `show` also gets the metrics and the preview that `validate` returned.
    Every validation follows a checkpoint of the same step; if the previous run was interrupted in between, the loop
    starts with that validation. The weights of the best validation are kept.
    """
    training, process, saved = step.training, step.process, first_step
    keep = BestWeights(step, run, first_step)
    last_step = None if training.max_hours is not None else training.max_steps

    def run_validation(done: int) -> None:
        with watch.guard(run.path, done - 1, "validation", saved), recorder.paused("validation"):
            metrics, preview = validate()
            keep(done, metrics)
            show(recorder, done, metrics, preview)

    every, seconds = (training.validate_every, training.save_every), step.schedule.seconds_left
    clock = RunClock(first_step, last_step, *every, seconds)
    trackers = open_trackers(step.settings, run, step.stage, first_step) if process.is_rank_zero else []
    recording = Recorder(run, step.stage, first_step, last_step, process, clock, trackers)
    with recording as recorder, StopSignal() as stop:
        step.schedule.start()
        is_end = step.schedule.is_over(first_step)
        is_validated = _is_validated_at(first_step, training, is_end)
        if is_validated and not process.broadcast(recorder.has_validation(first_step)):
            run_validation(first_step)

        for done, micro_batches in enumerate(recorder.timed(() if is_end else batches), first_step + 1):
            with watch.guard(run.path, done - 1, "training", saved):
                recorder.add(step(micro_batches, done - 1), training.samples_per_rank)
            tenths = step.schedule.tenths
            step.schedule.read_clock(process)
            is_end = step.schedule.is_over(done)
            is_validated = _is_validated_at(done, training, is_end)
            must_stop = process.any(bool(stop))
            # How many steps a time allows is not known beforehand: it may be fewer than `save_every`.
            is_due = done % training.save_every == 0 or step.schedule.tenths > tenths
            is_saved = is_due or is_validated or must_stop
            is_logged = done % training.log_every == 0 or is_end

            if is_logged or is_saved:
                step.guard.raise_if_bad(saved)
            if is_logged:
                recorder.log(done, **step.learning_rates(done - 1), **watch.read())
                if announcement := clock.announcement(done):
                    log.info("%s", announcement)

            # Save before validating, so that a crash during validation repeats no step.
            if is_saved:
                with recorder.paused("save"):
                    save(done)
                saved = done

            # Skip validation when stopping: a scheduler may kill the process soon after its signal.
            if must_stop and not is_end:
                log.warning("stopped after step %d; run the same command again to continue", done)
                return False

            if is_validated:
                run_validation(done)
            if is_end:
                break
    return True


def _is_validated_at(done: int, training: TrainingSettings, is_end: bool) -> bool:
    return done > 0 and (done % training.validate_every == 0 or is_end)
