"""Logging during training: a progress bar or plain lines, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime.cli import STEP_LINES
from runtime.cli.bars import ProgressBar
from runtime.files import RunFolder, write_text
from runtime.processes import Process
from training.recording.progress import ELAPSED, RunClock

log = logging.getLogger(__name__)
step_lines = logging.getLogger(STEP_LINES)

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


class DataWait:
    """Adds up the waiting time over log lines and warns once, with what to change."""

    def __init__(self) -> None:
        self._lines, self._waited, self._elapsed, self._has_warned = 0, 0.0, 0.0, False

    def share(self, waited: float, elapsed: float) -> float:
        """Return the share of one log line; warn once if it stays above `LARGEST_WAIT`.

        The first line, which includes the start of the workers, is not counted, and two more are awaited.
        """
        self._lines += 1
        if self._lines > 1:
            self._waited, self._elapsed = self._waited + waited, self._elapsed + elapsed
        total = self._waited / self._elapsed if self._elapsed > 0 else 0.0
        if self._lines > 3 and total > LARGEST_WAIT and not self._has_warned:
            self._has_warned = True
            log.warning(
                "waiting for data takes %.0f %% of the time; raise data.num_workers, set data.prepared: disk or memory "
                "if it is none, or turn data.use_augmentation off",
                100 * total,
            )
        return waited / elapsed if elapsed > 0 else 0.0


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
        self._data_wait = DataWait()
        if process.is_rank_zero:
            # Importing this takes a second, so only the process that writes does it.
            from torch.utils.tensorboard import SummaryWriter

            first_step, last_step = clock.first_step, clock.last_step
            drop_later_lines(run.metrics, stage, first_step)
            self._lines = run.metrics.open("a", encoding="utf-8")
            self._board = SummaryWriter(str(run.tensorboard / stage), purge_step=first_step + 1 if first_step else None)
            style = _TIMED_BAR if last_step is None else _BAR
            if sys.stderr.isatty():
                self._bar = ProgressBar(
                    total=last_step, initial=first_step, desc=stage, dynamic_ncols=True, bar_format=style
                )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        names = list(self._sums)
        means = torch.stack([self._sums[name].float() / self._counts[name] for name in names]).double().cpu()
        means = self.process.sum(means) / self.process.world_size
        now = time.perf_counter()
        line = {name: float(value) for name, value in zip(names, means, strict=True)}
        line[_THROUGHPUT] = self._samples * self.process.world_size / (now - self._since)
        line[_WAITING] = self._data_wait.share(self._waited, now - self._since)
        self._waited = 0.0
        line |= extra
        self.clock.mark(step)
        self._sums, self._counts, self._samples, self._since = {}, {}, 0, now
        self.write(step, line)
        if self.process.is_rank_zero:
            self._show(step, line)

    def _show(self, step: int, line: dict[str, float]) -> None:
        """Show the bar's figures, and log a plain line with them for those who have no bar."""
        loss = f"{line.get('reconstruction', line.get('diffusion', float('nan'))):.4g}"
        peak = line.get("memory_peak_gib", line.get("host_memory_peak_gib"))
        waiting = f"{line[_WAITING]:.0%}" if line[_WAITING] > LARGEST_WAIT else ""
        left, speed = "" if step == self.clock.last_step else self.clock.text(step), self.clock.seconds_per_step
        of = "" if self.clock.last_step is None else f"/{self.clock.last_step}"
        words = [
            f"{self.stage} step {step}{of}: loss {loss}",
            f"{speed:.3g} s per step" if speed else "",
            f"{left} left" if left else "",
            f"peak {peak:.2f} GiB" if peak is not None else "",
            f"{waiting} of the time waiting for data" if waiting else "",
        ]
        step_lines.info("%s", ", ".join(filter(None, words)))
        if self._bar is not None:
            shown = {"left": left, "loss": loss, "vol/s": f"{line[_THROUGHPUT]:.4g}", "waiting for data": waiting}
            shown["peak GiB"] = f"{peak:.4g}" if peak is not None else ""
            self._bar.set_postfix({name: value for name, value in shown.items() if value})

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
    def paused(self, kind: str) -> Iterator[None]:
        """Exclude the time spent inside the block, a "save" or a "validation", from the throughput."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._since += seconds
        self.clock.pause(kind, seconds)


def drop_later_lines(path: Path, stage: str, step: int) -> None:
    """Remove the lines that a killed run wrote after its last checkpoint, because those steps will be repeated."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _is_kept(line, stage, step)]
    if kept != lines:
        write_text(path, "".join(kept))


def _is_kept(line: str, stage: str, step: int) -> bool:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return False  # truncated when the run was killed
    return isinstance(entry, dict) and (entry.get("stage") != stage or entry.get("step", 0) <= step)
