"""What a run says while it trains: progress bar or plain lines, metrics.jsonl, TensorBoard, and the time left."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime.cli import STEP_LINES, ProgressBar
from runtime.files import RunFolder, write_text
from runtime.processes import Process

log = logging.getLogger(__name__)
step_lines = logging.getLogger(STEP_LINES)

INTERVALS = 20
"""Predictions use this many of the last intervals between log lines, because steps may become slower during a run."""

ELAPSED = "elapsed_seconds"
"""Key in metrics.jsonl: seconds since this start of the run, saves and validations included."""

Batches = TypeVar("Batches")
"""What a step gets; the recorder does not look at it."""

# tqdm's own estimate ignores validations, so the bar shows that of the clock.
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
_TIMED_BAR = "{desc}: step {n_fmt} [{elapsed}{postfix}]"

# Lines of training steps have this key; lines of validations do not.
_THROUGHPUT = "volumes_per_second"
# Time spent waiting for batches, as a share of the time since the previous line.
_WAITING = "data_wait_share"
LARGEST_WAIT = 0.1


class RunClock:
    """Times the steps of a run, and predicts the rest of it from them.

    Steps are timed between calls of `mark`, at which the device has finished its work. The first step is left out,
    because it also chooses kernels and fills caches. A run with a time limit has no `last_step`; `seconds` is the time
    it had left at the start.
    """

    def __init__(
        self,
        first_step: int,
        last_step: int | None,
        validate_every: int = 1,
        seconds: float | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.first_step, self.last_step = first_step, last_step
        self._validate_every, self._seconds, self._now = validate_every, seconds, now
        self._start = self._marked_at = now()
        self._marked_step = first_step
        self._intervals: deque[tuple[int, float]] = deque(maxlen=INTERVALS)
        self._paused = 0.0

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

    def pause(self, seconds: float) -> None:
        """Record the time of a save or a validation, which belongs to no step."""
        self._paused += seconds
        self._marked_at += seconds

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean of the last intervals; None before the first."""
        steps = sum(count for count, _ in self._intervals)
        return sum(seconds for _, seconds in self._intervals) / steps if steps else None

    def seconds_left(self, step: int) -> float | None:
        """Return the predicted time of the rest of the run, with a share of the pauses so far for each step."""
        of_step = self.seconds_per_step
        if of_step is None:
            return None
        if self.last_step is None:
            return None if self._seconds is None else max(0.0, self._seconds - self.elapsed)
        # A resumed run may validate after few steps, or before its first; the next validation is far away nevertheless.
        return (self.last_step - step) * (of_step + self._paused / max(self._validate_every, step - self.first_step))


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


class Recorder:
    """Collects metrics on the device and writes their means at each `log`, in the first process only."""

    def __init__(self, run: RunFolder, stage: str, process: Process, clock: RunClock) -> None:
        self.run, self.stage, self.process, self.clock = run, stage, process, clock
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._since = time.perf_counter()
        self._samples = 0
        self._bar: Any = None
        self._waited = 0.0
        if process.is_rank_zero:
            # Importing this takes a second, so only the process that writes does it.
            from torch.utils.tensorboard import SummaryWriter

            first_step, last_step = clock.first_step, clock.last_step
            drop_later_lines(run.metrics, stage, first_step)
            self._lines = run.metrics.open("a", encoding="utf-8")
            self._board = SummaryWriter(str(run.tensorboard / stage), purge_step=first_step + 1 if first_step else None)
            if sys.stderr.isatty():
                style = {"dynamic_ncols": True, "bar_format": _TIMED_BAR if last_step is None else _BAR}
                self._bar = ProgressBar(total=last_step, initial=first_step, desc=stage, **style)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.is_rank_zero:
            if self._bar is not None:
                self._bar.close()
            self._board.close()
            self._lines.close()

    def add(self, metrics: dict[str, Tensor], num_samples: int) -> None:
        """Add the metrics of one step without waiting for the device."""
        for name, value in metrics.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
            self._counts[name] = self._counts.get(name, 0) + 1
        self._samples += num_samples
        self.clock.step_done()
        if self._bar is not None:
            self._bar.update(1)

    def log(self, step: int, **extra: float) -> None:
        """Write the means since the last call, and the values in `extra` as they are; wait for the device."""
        means = torch.stack([total.float() / self._counts[name] for name, total in self._sums.items()]).double().cpu()
        means = self.process.sum(means) / self.process.world_size
        now = time.perf_counter()
        line = dict(zip(self._sums, means.tolist(), strict=True))
        line[_THROUGHPUT] = self._samples * self.process.world_size / (now - self._since)
        line[_WAITING] = self._waited / (now - self._since)
        line |= extra
        self.clock.mark(step)
        self._sums, self._counts, self._samples, self._waited, self._since = {}, {}, 0, 0.0, now
        self.write(step, line)
        if self.process.is_rank_zero:
            self._show(step, line)

    def _show(self, step: int, line: dict[str, float]) -> None:
        """Show the figures beside the bar, and log a plain line with them for those who have no bar."""
        figures = [f"loss {line.get('reconstruction', line.get('diffusion', float('nan'))):.4g}"]
        if speed := self.clock.seconds_per_step:
            figures.append(f"{speed:.3g} s per step")
        if step != self.clock.last_step and (left := self.clock.seconds_left(step)) is not None:
            figures.append(f"{duration_text(left)} left")
        if (peak := line.get("memory_peak_gib", line.get("host_memory_peak_gib"))) is not None:
            figures.append(f"peak {peak:.2f} GiB")
        if (waiting := line[_WAITING]) > LARGEST_WAIT:
            figures.append(f"{waiting:.0%} of the time waiting for data: raise data.num_workers")
        of = "" if self.clock.last_step is None else f"/{self.clock.last_step}"
        step_lines.info("%s step %d%s: %s", self.stage, step, of, ", ".join(figures))
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(figures))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the values of one step to metrics.jsonl and TensorBoard, and when that was.

        Validations have their time as well, because no line follows the last one.
        """
        if self.process.is_rank_zero:
            elapsed = round(self.clock.elapsed, 3)
            self._lines.write(json.dumps({"stage": self.stage, "step": step, **values, ELAPSED: elapsed}) + "\n")
            self._lines.flush()
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def timed(self, batches: Iterable[Batches]) -> Iterator[Batches]:
        """Yield the batches, and add up how long the loop waited for them."""
        began = time.perf_counter()
        for batch in batches:
            self._waited += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def has_validation(self, step: int) -> bool:
        """Return whether metrics.jsonl has the validation of a step; always False except in the first process."""
        if not self.process.is_rank_zero:
            return False
        lines = map(json.loads, self.run.metrics.read_text(encoding="utf-8").splitlines())
        return any(
            line.get("stage") == self.stage and line.get("step") == step and _THROUGHPUT not in line for line in lines
        )

    def image(self, step: int, name: str, pixels: Tensor) -> None:
        """Write a picture (H, W; grey values from 0 to 255) to TensorBoard."""
        if self.process.is_rank_zero:
            self._board.add_image(name, pixels, step, dataformats="HW")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside the block, a save or a validation, from the throughput."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._since += seconds
        self.clock.pause(seconds)


def drop_later_lines(path: Path, stage: str, step: int) -> None:
    """Remove the lines that a killed run wrote after its last checkpoint, because those steps will be repeated."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = []
    for line in lines:
        with suppress(json.JSONDecodeError):  # truncated when the run was killed
            entry = json.loads(line)
            if isinstance(entry, dict) and (entry.get("stage") != stage or entry.get("step", 0) <= step):
                kept.append(line)
    if kept != lines:
        write_text(path, "".join(kept))
