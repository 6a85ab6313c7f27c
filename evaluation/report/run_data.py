"""Read the files of a run into plain values for the page. A run that has only just started is not an error."""

from __future__ import annotations

import json
import math
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from evaluation.report.records import (
    Environment,
    Evaluation,
    MemoryRecord,
    OutOfMemoryReport,
    read_metrics,
    read_record,
)
from evaluation.report.volumes import viewer_data
from runtime.files.run_folder import STAGES, RunFolder
from settings import Settings, UserError, known_keys, load_settings, look_up
from settings.section import is_section
from training.recording.progress import ELAPSED

MAX_POINTS = 600
VOLUME_BUDGET_BYTES = 3_200_000
"""Encoded images per page, over all runs; with everything else the page stays below 5 MB."""


def read_run(path: Path, volume_budget: int = VOLUME_BUDGET_BYTES) -> dict[str, Any]:
    """Return everything that the page shows of one run; raise `UserError` if the folder is not a run."""
    run = RunFolder(path)
    if not os.path.isfile(run.config):
        raise UserError(f"{path}: no config.yaml; give the folder of a run, such as runs/quickstart")
    settings = load_settings(run.config)
    environment = read_record(run.environment, Environment) or {}
    lines = read_metrics(run.metrics)
    stages = [stage for stage in (_stage(run, settings, name, lines) for name in STAGES) if stage is not None]
    failure = read_record(path / "oom_report.json", OutOfMemoryReport) or {}
    is_past = any(stage["name"] == failure.get("stage") and stage["step"] > failure["step"] for stage in stages)
    return {
        "name": settings.name,
        "folder": str(path),
        "stages": stages,
        "data": _data(settings, environment.get("data", {})),
        "viewer": viewer_data(run, volume_budget),
        "config": _config(settings),
        "environment": environment,
        "evaluation": read_record(run.evaluation, Evaluation),
        "out_of_memory": None if is_past else failure,
    }


def _stage(run: RunFolder, settings: Settings, stage: str, metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    lines = [line for line in metrics if line.get("stage") == stage]
    memory = read_record(run.path / f"memory_{stage}.json", MemoryRecord)
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
        finite = [point for point in part if point[1] is not None]
        extremes = [min(finite, key=_value), max(finite, key=_value)] if finite else part[:1]
        kept += sorted({id(point): point for point in extremes}.values(), key=lambda point: point[0] or 0)
    if kept[-1] is not points[-1]:
        kept.append(points[-1])
    return kept


def _value(point: list[float | None]) -> float:
    return point[1] or 0.0


def _data(settings: Settings, recorded: dict[str, Any]) -> dict[str, str]:
    """Return what the config says about the data, and the numbers that training has recorded, in words."""
    data = settings.data
    rules = [data.intensity.of_channel(number) for number in range(data.intensity.num_rules)]
    units = {"percentile": " %", "window": ""}
    facts = {
        "source": data.source,
        "grid": " x ".join(map(str, data.voxel_size)),
        "resampled to": "" if data.spacing is None else " x ".join(f"{mm:g}" for mm in data.spacing) + " mm",
        "patches": "" if data.patch_size is None else " x ".join(map(str, data.patch_size)),
        "intensities": ", ".join(f"{mode} {low:g}{units[mode]} to {high:g}{units[mode]}" for mode, low, high in rules),
        "augmentation": "on" if data.use_augmentation else "off",
        "training volumes": str(recorded.get("training", "")),
        "held-out volumes": str(recorded.get("held_out", "")),
        "classes": ", ".join(map(str, recorded["classes"])) if isinstance(recorded.get("classes"), list) else "",
    }
    return {name: value for name, value in facts.items() if value}


def _config(settings: Settings) -> list[dict[str, str]]:
    """Return every key of the config with its value and its default."""
    now, defaults = settings.model_dump(mode="json"), Settings().model_dump(mode="json")
    keys = [dotted for dotted, field in known_keys() if not is_section(field)]
    return [{"key": key, "value": _plain(look_up(now, key)), "default": _plain(look_up(defaults, key))} for key in keys]


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
