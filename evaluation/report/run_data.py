"""Read the files of a run into plain values for the page.

A run that has only just started is not an error. Damaged files are logged and left out, so that the rest can be shown.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaluation.report.volumes import viewer_data
from runtime.files import STAGES, RunFolder, check_regular, counted, read_text, reason
from settings import Settings, UserError, known_keys, load_settings, look_up
from settings.section import is_section
from training.recording import ELAPSED

log = logging.getLogger(__name__)

MAX_POINTS = 600
VOLUME_BUDGET_BYTES = 3_200_000
"""Encoded images per page, over all runs; with everything else the page stays below 5 MB."""

# Browsers represent larger integers inexactly.
LARGEST_STEP = 2**53


class _Record(BaseModel):
    """The fields that the page needs; other fields of the file are kept."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class _Environment(_Record):
    """environment.json."""

    device: str | None = None
    command: list[str] = Field(default_factory=list)
    packages: dict[str, str] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)


class _Prediction(_Record):
    peak_allocated_bytes: float = Field(ge=0)
    required_bytes: float = Field(ge=0)
    host_bytes: float = Field(ge=0)
    phase: str
    margin: float
    breakdown: dict[str, float]


class _MemoryRecord(_Record):
    """memory_<stage>.json."""

    prediction: _Prediction | None


class _NextRung(_Record):
    name: str
    promise: str


class _OutOfMemoryReport(_Record):
    """oom_report.json."""

    stage: str
    step: int = Field(ge=0, le=LARGEST_STEP)
    phase: str = ""
    next_rung: _NextRung | None = None


class _Evaluation(_Record):
    """evaluation.json."""

    table: str = ""


def read_run(path: Path, volume_budget: int = VOLUME_BUDGET_BYTES) -> dict[str, Any]:
    """Return everything that the page shows of one run; raise `UserError` if the folder is not a run."""
    run = RunFolder(path)
    if not os.path.isfile(run.config):
        raise UserError(f"{path}: no config.yaml; give the folder of a run, such as runs/quickstart")
    settings = load_settings(run.config)
    environment = _read_record(run.environment, _Environment) or {}
    lines = _read_metrics(run.metrics)
    stages = [stage for stage in (_stage(run, settings, name, lines) for name in STAGES) if stage is not None]
    failure = _read_record(path / "oom_report.json", _OutOfMemoryReport) or {}
    is_past = any(stage["name"] == failure.get("stage") and stage["step"] > failure["step"] for stage in stages)
    return {
        "name": settings.name,
        "folder": str(path),
        "stages": stages,
        "viewer": viewer_data(run, volume_budget),
        "config": _config(settings),
        "environment": environment,
        "evaluation": _read_record(run.evaluation, _Evaluation),
        "out_of_memory": None if is_past else failure,
    }


def _stage(run: RunFolder, settings: Settings, stage: str, metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    lines = [line for line in metrics if line.get("stage") == stage]
    memory = _read_record(run.path / f"memory_{stage}.json", _MemoryRecord)
    if not lines and memory is None:
        return None
    training = settings.training_of(stage)
    step = max((line["step"] for line in lines), default=0)
    # The weights of a finished run that is being continued are still there.
    is_continued = training.max_hours is None and 0 < step < training.max_steps
    return {
        "name": stage,
        "step": step,
        "max_steps": training.max_steps,
        "max_hours": training.max_hours,
        "is_finished": run.weights(stage).is_file() and not is_continued,
        "seconds": _seconds(lines),
        "curves": _curves(lines),
        "memory": memory,
    }


def _seconds(lines: list[dict[str, Any]]) -> float | None:
    """Return how long the steps so far took, validations included; each start of the run counts from zero."""
    readings = [line[ELAPSED] for line in lines if isinstance(line.get(ELAPSED), int | float)]
    ends = [one for one, after in pairwise(readings) if after < one]
    total = sum([*ends, *readings[-1:]])
    return float(total) if readings and math.isfinite(total) else None


def _curves(lines: list[dict[str, Any]]) -> dict[str, list[list[float | None]]]:
    """Return thinned [step, value] pairs by metric; a value that is not finite becomes null and breaks the line."""
    curves: dict[str, list[list[float | None]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("stage", "step", ELAPSED) and isinstance(value, int | float):
                # JSON integers can exceed the range of a float.
                shown = float(f"{value:.6g}") if abs(value) <= sys.float_info.max else None
                curves.setdefault(name, []).append([line["step"], shown])
    return {name: _thin(points) for name, points in curves.items()}


def _thin(points: list[list[float | None]]) -> list[list[float | None]]:
    """Return about MAX_POINTS points: the lowest and highest of each interval, so that no spike is lost."""
    interval = math.ceil(2 * len(points) / MAX_POINTS)
    if interval <= 2:
        return points
    kept: list[list[float | None]] = []
    for first in range(0, len(points), interval):
        part = points[first : first + interval]
        by_value = sorted((point for point in part if point[1] is not None), key=lambda point: point[1] or 0.0)
        extremes = by_value[:1] + by_value[-1:] or part[:1]
        kept += [point for point in part if point in extremes or point is points[-1]]
    return kept


def _config(settings: Settings) -> list[dict[str, str]]:
    """Return every key of the config with its value and its default."""
    now, defaults = settings.model_dump(mode="json"), Settings().model_dump(mode="json")
    keys = [dotted for dotted, field in known_keys() if not is_section(field)]
    return [{"key": key, "value": _plain(look_up(now, key)), "default": _plain(look_up(defaults, key))} for key in keys]


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def _read_record(path: Path, kind: type[_Record]) -> dict[str, Any] | None:
    """Return the content of a file; None if it does not exist or is damaged, which is logged."""
    try:
        return kind.model_validate(json.loads(read_text(path))).model_dump()
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg']}"
    except OSError as error:
        why = reason(error)
    except (ValueError, RecursionError) as error:
        why = f"not JSON: {error}"
    log.warning("%s: damaged (%s); left out of the report", path, why)
    return None


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; skip damaged ones, such as the last line of a killed run."""
    try:
        check_regular(path)
        texts = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s: damaged (%s); left out of the report", path, reason(error))
        return []
    lines = [_metrics_line(text) for text in texts]
    num_damaged = sum(text.strip() != b"" and line is None for text, line in zip(texts[:-1], lines, strict=False))
    if num_damaged:
        log.warning("%s: %s; left out of the report", path, counted(num_damaged, "damaged line"))
    return [line for line in lines if line is not None]


def _metrics_line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("step")) is not int or not 0 <= line["step"] <= LARGEST_STEP:
        return None
    return line
