"""Recognise that memory ran out, report what was alive and what to change, and choose the next rung."""

from __future__ import annotations

import difflib
import errno
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memory.ladder.rungs import Rung
from memory.ladder.text import as_overrides, promise
from memory.ladder.walk import next_same_mathematics_rung
from memory.predict.prediction import Prediction, Stage
from memory.predict.text import gib
from memory.watch.readings import MemoryReadings
from runtime.cli import OUT_OF_MEMORY
from runtime.files import write_text
from settings import Settings, UserError, dump_yaml
from training.guard import checkpoint_state

log = logging.getLogger(__name__)
REPORT = "oom_report.json"
# Messages of torch's CPU allocator, oneDNN and the C++ runtime.
_CPU_MESSAGES = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "bad allocation",
    "could not create a memory",
    "out of memory",
    "unable to mmap",
)


class TrainingOutOfMemoryError(UserError):
    """Training ran out of memory; the text says what to do, and the exit code is 3.

    `saved` is the step of the last checkpoint, or 0.
    """

    exit_code = OUT_OF_MEMORY

    def __init__(self, text: str, saved: int = 0) -> None:
        super().__init__(text)
        self.saved = saved


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _CPU_MESSAGES)


@dataclass(frozen=True)
class Failure:
    """How memory ran out: the error, its phase and its step; `saved`: the step of the last checkpoint, or 0."""

    error: BaseException
    phase: str
    step: int
    saved: int = 0


def report_out_of_memory(
    failure: Failure,
    folder: Path,
    settings: Settings,
    stage: Stage,
    prediction: Prediction | None = None,
    num_processes: int = 1,
) -> TrainingOutOfMemoryError:
    """Write `oom_report.json` and return the error to raise; both give phase, step, breakdown and next rung."""
    rung = next_same_mathematics_rung(settings, stage)
    error = failure.error
    report: dict[str, Any] = {
        "stage": stage,
        "phase": failure.phase,
        "step": failure.step,
        "last_checkpoint": failure.saved or None,
        "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        "breakdown": prediction.breakdown if prediction is not None else None,
        "largest": prediction.largest if prediction is not None else None,
        "predicted_peak_bytes": prediction.required_bytes if prediction is not None else None,
        "readings": MemoryReadings(torch.device("cuda" if torch.cuda.is_available() else "cpu")).read(),
        "next_rung": None,
    }
    if rung is not None:
        changed = {"changes": rung.changes, "yaml_diff": yaml_diff(settings, rung.settings)}
        report["next_rung"] = {"name": rung.name, "promise": promise(rung.same_mathematics), **changed}
    path = folder / REPORT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(report, indent=2) + "\n")
    except OSError as problem:
        log.warning("%s: cannot be written (%s)", path, problem)
    text = _explain(failure, prediction, rung, settings, num_processes)
    return TrainingOutOfMemoryError(f"{text}\n  details: {path}", failure.saved)


def settings_of_next_rung(settings: Settings, stage: Stage, saved: int) -> Settings | None:
    """Return the settings of the next rung with the same mathematics (`--on-oom next-rung`); None if none is left."""
    has_gpu = settings.device.type != "cpu" and torch.cuda.is_available()
    here = settings if has_gpu else settings.with_overrides({"device.type": "cpu"})
    rung = next_same_mathematics_rung(here, stage)
    if rung is None:
        return None
    how = f"resuming from the checkpoint of step {saved}" if saved else "there is no checkpoint yet; starting again"
    log.warning("memory: out of memory; %s with %s (%s)", how, rung.name, as_overrides(rung))
    return settings.with_overrides(rung.changes)


def yaml_diff(before: Settings, after: Settings) -> str:
    """Return the changes between two configs as a unified diff of their YAML."""
    lines = difflib.unified_diff(
        dump_yaml(before).splitlines(), dump_yaml(after).splitlines(), "config.yaml", "next rung", lineterm="", n=1
    )
    return "\n".join(lines)


def _explain(
    failure: Failure, prediction: Prediction | None, rung: Rung | None, settings: Settings, num_processes: int
) -> str:
    lines = [f"step {failure.step + 1}, {failure.phase}: out of memory; {checkpoint_state(failure.saved)}"]
    if prediction is not None and prediction.breakdown:
        parts = sorted(prediction.breakdown.items(), key=lambda part: -part[1])
        lines.append("  at the predicted peak: " + ", ".join(f"{name} {gib(n)}" for name, n in parts if n))
    if rung is None:
        lines.append("  no rung with the same mathematics is left; scripts/oom_ladder.py shows those that change it")
    else:
        lines += [f"  next rung ({promise(rung.same_mathematics)}): {rung.name}"]
        lines += [f"    {line}" for line in yaml_diff(settings, rung.settings).splitlines()]
        alternative = "--on-oom next-rung does this automatically, but only for a single process"
        if num_processes == 1:
            alternative = "or add --on-oom next-rung"
        lines.append(f"  make this change to the config and run the same command again; {alternative}")
    return "\n".join(lines)
