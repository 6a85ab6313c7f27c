"""How long a run takes: measured on its own steps, saves and validations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from runtime.files import counted

INTERVALS = 20
"""Predictions use this many of the last intervals between log lines, because steps may become slower during a run."""


ELAPSED = "elapsed_seconds"
"""Key in metrics.jsonl: seconds since this start of the run, saves and validations included."""


class RunClock:
    """Measures steps, saves and validations, and predicts the rest of the run from them.

    Steps are timed between calls of `mark`, at which the device has finished its work. The first step is left out,
    because it also chooses kernels and fills caches. A run with a time limit has no `last_step`; `seconds` is the time
    it had left at the start.
    """

    def __init__(
        self,
        first_step: int,
        last_step: int | None,
        validate_every: int = 0,
        save_every: int = 0,
        seconds: float | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.first_step, self.last_step = first_step, last_step
        self._validate_every, self._save_every = validate_every, save_every
        self._seconds, self._now = seconds, now
        self._start = self._marked_at = now()
        self._marked_step = first_step
        self._intervals: deque[tuple[int, float]] = deque(maxlen=INTERVALS)
        self._pauses: dict[str, list[float]] = {"save": [], "validation": []}
        self._announced = 0

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start, pauses included."""
        return self._now() - self._start

    def step_done(self) -> None:
        """Start timing after the first step."""
        if self._marked_step == self.first_step:
            self._marked_step, self._marked_at = self.first_step + 1, self._now()

    def mark(self, step: int) -> None:
        """Record that the device has finished all steps up to `step`."""
        if step > self._marked_step:
            now = self._now()
            self._intervals.append((step - self._marked_step, now - self._marked_at))
            self._marked_step, self._marked_at = step, now

    def pause(self, kind: str, seconds: float) -> None:
        """Record the time of a save or a validation, which belongs to no step."""
        self._pauses[kind].append(seconds)
        self._marked_at += seconds

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean of the last intervals; None before the first."""
        steps = sum(count for count, _ in self._intervals)
        return sum(seconds for _, seconds in self._intervals) / steps if steps else None

    @property
    def has_validated(self) -> bool:
        """Return whether the time of a validation is known."""
        return bool(self._pauses["validation"])

    def validations_left(self, step: int) -> int:
        """Return the number of validations after `step`; the last step always has one."""
        if not self._validate_every or self.last_step is None or step >= self.last_step:
            return 0
        return (self.last_step - 1) // self._validate_every - step // self._validate_every + 1

    def seconds_left(self, step: int) -> float | None:
        """Return the predicted time of the rest of the run, with the saves and validations whose time is known."""
        of_step = self.seconds_per_step
        if of_step is None:
            return None
        if self.last_step is None:
            return None if self._seconds is None else max(0.0, self._seconds - self.elapsed)
        saves = (self.last_step - step) // self._save_every if self._save_every else 0
        left = {"save": max(saves, self.validations_left(step)), "validation": self.validations_left(step)}
        pauses = sum(left[kind] * sum(seconds) / len(seconds) for kind, seconds in self._pauses.items() if seconds)
        return (self.last_step - step) * of_step + pauses

    def text(self, step: int) -> str:
        """Return the time left in words; empty before the first interval.

        Until the time of a validation is known, the remaining validations are counted instead.
        """
        left = self.seconds_left(step)
        if left is None:
            return ""
        validations = self.validations_left(step)
        is_unknown = validations and not self.has_validated
        return duration_text(left) + (f" + {counted(validations, 'validation')}" if is_unknown else "")

    def announcement(self, step: int) -> str:
        """Return the time left as a sentence: once when steps have been timed, once more when a validation has."""
        known = 0 if self.seconds_per_step is None else 1 + self.has_validated
        left = self.seconds_left(step)
        if known <= self._announced or not left:
            return ""
        self._announced = known
        finish = time.strftime("%a %H:%M", time.localtime(time.time() + left))
        return f"time left: {self.text(step)} at {self.seconds_per_step:.3g} s per step (until about {finish})"


def duration_text(seconds: float) -> str:
    """Return a duration in the two units that matter: 45 s, 12 min 5 s, 3 h 20 min, 2 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"
