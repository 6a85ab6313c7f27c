"""The training loop of both stages: step, log, save and validate until the last step or a stop signal."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from training.checkpoints import BestWeights, ResumableRun
from training.recording import Recorder, RunClock

log = logging.getLogger(__name__)


def run_loop(
    run: ResumableRun,
    batches: Iterable[Sequence[Any]],
    watch: Any,
    validate: Callable[[], tuple[dict[str, float], Any]],
    show: Callable[[Recorder, int, dict[str, float], Any], None],
) -> bool:
    """Train on `batches`, which start at `run.first_step`; return False when stopped by a signal before the last step.

    `watch` is a `memory.watch.MemoryWatch`. `show` gets the number of finished steps, and the metrics and the preview
    that `validate` returned. Every validation follows a checkpoint of the same step; if the previous run was
    interrupted in between, the loop starts with that validation. The weights of the best validation are kept.
    """
    step, folder, saved = run.step, run.folder, run.first_step
    training, process, schedule = step.training, step.process, step.schedule
    keep = BestWeights(step, folder, run.first_step)

    def run_validation(done: int) -> None:
        with watch.guard(folder.path, done - 1, "validation", saved), recorder.paused():
            metrics, preview = validate()
            keep(done, metrics)
            show(recorder, done, metrics, preview)
            process.barrier()  # the preview is rank zero's work alone

    last_step = None if training.max_hours is not None else training.max_steps
    clock = RunClock(run.first_step, last_step, training.validate_every, schedule.seconds_left)

    def is_validated_at(done: int) -> bool:
        return done > 0 and (done % training.validate_every == 0 or schedule.is_over(done))

    with Recorder(folder, step.stage, process, clock) as recorder, StopSignal() as stop:
        schedule.start()
        is_end = schedule.is_over(run.first_step)
        if is_validated_at(run.first_step) and not process.broadcast(recorder.has_validation(run.first_step)):
            run_validation(run.first_step)

        for done, micro_batches in enumerate(recorder.timed(() if is_end else batches), run.first_step + 1):
            with watch.guard(folder.path, done - 1, "training", saved):
                recorder.add(step(micro_batches, done - 1), training.samples_per_rank)
            tenths = schedule.tenths
            schedule.read_clock(process)
            is_end = schedule.is_over(done)
            is_validated = is_validated_at(done)
            must_stop = process.any(bool(stop))
            # How many steps a time allows is not known beforehand: it may be fewer than `save_every`.
            is_due = done % training.save_every == 0 or schedule.tenths > tenths
            is_saved = is_due or is_validated or must_stop
            is_logged = done % training.log_every == 0 or is_end

            if is_logged or is_saved:
                step.guard.raise_if_bad(saved)
            if is_logged:
                recorder.log(done, **step.learning_rates(done - 1), **watch.read())

            # Save before validating, so that a crash during validation repeats no step.
            if is_saved:
                with recorder.paused():
                    run.save(done)
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


class StopSignal:
    """Records the first stop signal; a SIGINT after it ends the process at once.

    A SIGHUP that is ignored, as nohup has it, stays so.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
        for number in (signal.SIGINT, signal.SIGTERM, *hangup, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            # The system's own handling, because Python's would wait for the end of a long operation.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # Output that has no place to go after its terminal was closed is dropped: it would end the run.
            for descriptor in (1, 2):
                try:
                    os.write(descriptor, b"")
                except OSError:
                    with open(os.devnull, "wb") as nowhere:
                        os.dup2(nowhere.fileno(), descriptor)
            # Not through logging: the signal may interrupt a write to the same stream, which is not reentrant.
            if os.environ.get("LOCAL_RANK", "0") == "0":
                text = "finishing this step, then saving a checkpoint (Ctrl-C again stops at once)"
                with contextlib.suppress(OSError):
                    os.write(2, f"\n{self.received}: {text}\n".encode())

    def __bool__(self) -> bool:
        return self.received is not None
