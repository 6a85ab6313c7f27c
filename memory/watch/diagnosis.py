"""What a training script says about memory: the prediction before the first step, and the report when it runs out."""

from __future__ import annotations

import difflib
import errno
import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from command_line import OUT_OF_MEMORY
from memory.ladder.rungs import Rung
from memory.ladder.text import as_override, gib
from memory.ladder.walk import next_same_mathematics_rung, promise
from memory.predict.prediction import Prediction, PredictionError, Predictor, Stage
from memory.watch.calibration import corrected, record
from memory.watch.readings import MemoryReadings, device_bytes
from settings import Settings, UserError, dump_yaml
from training.guard import checkpoint_state

log = logging.getLogger(__name__)
REPORT = "oom_report.json"
# How the CPU says it: torch's allocator, oneDNN's, and the C++ runtime's.
_CPU_WORDS = (
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
    """Training ran out of memory; the text holds what to do, the exit code is 3.

    `saved` is the step of the last checkpoint, 0 when there is none.
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
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _CPU_WORDS)


class BackgroundPrediction:
    """A prediction that runs in its own process while the data are prepared.

    Start it early, call `announce` before the first step and `close` at the end; a prediction that fails never stops a
    training.
    """

    def __init__(self, settings: Settings, stage: Stage) -> None:
        self.settings, self.stage = settings, stage
        self._predictor: Predictor | None = Predictor()
        self._future: Future[Prediction] = self._predictor.submit(settings, stage)
        self._result: Prediction | None = None

    def result(self, timeout: float | None = 120.0) -> Prediction | None:
        """Return the prediction, waiting for it at most `timeout` seconds; None when there is none."""
        if self._result is None and self._predictor is not None:
            try:
                self._result = corrected(self._future.result(timeout))
            except (PredictionError, TimeoutError) as error:
                log.warning("memory: no prediction (%s)", str(error) or "it took too long")
            self.close()
        return self._result

    def announce(self, device: torch.device) -> Prediction | None:
        """Log the predicted peak against what the device has; warn with the next rung when it will not fit."""
        prediction = self.result()
        if prediction is not None:
            _announce(prediction, self.settings, self.stage, device_bytes(device))
        return prediction

    def close(self) -> None:
        """End the process."""
        if self._predictor is not None:
            self._predictor.close()
            self._predictor = None


def _announce(prediction: Prediction, settings: Settings, stage: Stage, available: int) -> None:
    log.info(
        "memory: predicted peak %s (%s in tensors), the device has %s; peak in: %s; a real step may need %d %% more",
        gib(prediction.required_bytes),
        gib(prediction.peak_allocated_bytes),
        gib(available),
        prediction.phase,
        round(100 * prediction.margin),
    )
    if prediction.fits(available):
        return
    rung = next_same_mathematics_rung(settings, stage)
    advice = f"; next rung: {rung.name} ({_as_overrides(rung)})" if rung is not None else ""
    log.warning("memory: this will probably not fit%s; scripts/oom_ladder.py shows all rungs", advice)


def record_first_step(prediction: Prediction | None, readings: MemoryReadings) -> None:
    """Let the first real step correct later predictions on this machine; call it once, after the step."""
    if prediction is None:
        return
    factor = record(prediction, readings.measured_bytes())
    if factor is not None:
        log.info("memory: the first step needed %.2f of its prediction; later predictions use that", factor)


def report_out_of_memory(
    error: BaseException,
    folder: Path,
    settings: Settings,
    stage: Stage,
    phase: str,
    step: int,
    prediction: Prediction | None = None,
    saved: int = 0,
    num_processes: int = 1,
) -> TrainingOutOfMemoryError:
    """Write `oom_report.json` and return the error to raise: phase, step, breakdown and the next rung.

    The config stays as it is; `settings_of_next_rung` gives the changed one. `saved` is the step of the last
    checkpoint, 0 when there is none.
    """
    rung = next_same_mathematics_rung(settings, stage)
    report = {
        "stage": stage,
        "phase": phase,
        "step": step,
        "last_checkpoint": saved or None,
        "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        "breakdown": prediction.breakdown if prediction is not None else None,
        "largest": prediction.largest if prediction is not None else None,
        "predicted_peak_bytes": prediction.required_bytes if prediction is not None else None,
        "readings": _readings(),
        "next_rung": _rung_to_json(rung, settings),
    }
    path = folder / REPORT
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as failure:
        log.warning("%s: cannot be written (%s)", path, failure)
    return TrainingOutOfMemoryError(_explain(report, path, rung, settings, num_processes), saved)


def settings_of_next_rung(settings: Settings, stage: Stage, saved: int) -> Settings | None:
    """Return the settings of the next rung with the same mathematics (`--on-oom next-rung`); None when none is left."""
    rung = next_same_mathematics_rung(settings, stage)
    if rung is None:
        return None
    where = f"going on from the checkpoint of step {saved}" if saved else "there is no checkpoint yet: beginning again"
    log.warning("memory: out of memory; %s with %s (%s)", where, rung.name, _as_overrides(rung))
    return rung.settings


def yaml_diff(before: Settings, after: Settings) -> str:
    """Return what changes between two configs, as a unified diff of their YAML."""
    lines = difflib.unified_diff(
        dump_yaml(before).splitlines(), dump_yaml(after).splitlines(), "config.yaml", "next rung", lineterm="", n=1
    )
    return "\n".join(lines)


def _rung_to_json(rung: Rung | None, settings: Settings) -> dict[str, Any] | None:
    if rung is None:
        return None
    return {
        "name": rung.name,
        "promise": promise(rung.same_mathematics),
        "changes": rung.changes,
        "yaml_diff": yaml_diff(settings, rung.settings),
    }


def _readings() -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return MemoryReadings(device).read()


def _explain(report: dict[str, Any], path: Path, rung: Rung | None, settings: Settings, num_processes: int) -> str:
    state = checkpoint_state(report["last_checkpoint"] or 0)
    lines = [f"step {report['step'] + 1}, {report['phase']}: out of memory; {state}"]
    if report["breakdown"]:
        parts = sorted(report["breakdown"].items(), key=lambda part: -part[1])
        lines.append("  at the predicted peak: " + ", ".join(f"{name} {gib(n)}" for name, n in parts if n))
    if rung is None:
        lines.append("  no rung with the same mathematics is left; scripts/oom_ladder.py shows those that change it")
    else:
        lines += [f"  next rung ({promise(rung.same_mathematics)}): {rung.name}"]
        lines += [f"    {line}" for line in yaml_diff(settings, rung.settings).splitlines()]
        alternative = "--on-oom next-rung does it by itself, but only for a single process"
        if num_processes == 1:
            alternative = "or add --on-oom next-rung"
        lines.append(f"  change the config like this and start the same command again; {alternative}")
    lines.append(f"  details: {path}")
    return "\n".join(lines)


def _as_overrides(rung: Rung) -> str:
    return " ".join(f"{key}={as_override(value)}" for key, value in rung.changes.items())
