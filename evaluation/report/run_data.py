"""Read the files of a run into plain values for the page.

A run that has only just started is not an error. Damaged files are logged and left out, so that the rest can be shown.
The small volumes of the slice viewer are those that `training.validation.previews` saves at each validation.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import os
import re
import struct
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from runtime.files import STAGES, RunFolder, check_regular, counted, read_text, reason
from settings import Settings, UserError, known_keys, load_settings, look_up
from settings.section import is_section
from training.recording import ELAPSED
from training.validation.previews import FACTS, ROLE, viewer_folder

log = logging.getLogger(__name__)

MAX_POINTS = 600
VOLUME_BUDGET_BYTES = 3_200_000
"""Encoded images per page, over all runs; with everything else the page stays below 5 MB."""

# Browsers represent larger integers inexactly.
LARGEST_STEP = 2**53
# Errors that Pillow raises for damaged images, and errors from metadata that is missing or not ours.
PICTURE_ERRORS = (OSError, SyntaxError, ValueError, KeyError, EOFError, struct.error, Image.DecompressionBombError)
_NAME = re.compile(rf"(?P<stage>[a-z]+)_(?P<step>\d{{8}})_(?P<role>{ROLE.pattern})\.png")


class _Record(BaseModel):
    """The fields that the page needs; other fields of the file are kept."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class _Environment(_Record):
    device: str | None = None
    command: list[str] = []
    packages: dict[str, str] = {}
    data: dict[str, Any] = {}


class _Prediction(_Record):
    peak_allocated_bytes: float = Field(ge=0)
    required_bytes: float = Field(ge=0)
    host_bytes: float = Field(ge=0)
    phase: str
    margin: float
    breakdown: dict[str, float]


class _Memory(_Record):
    prediction: _Prediction | None


class _NextRung(_Record):
    name: str
    promise: str


class _OutOfMemory(_Record):
    stage: str
    step: int = Field(ge=0, le=LARGEST_STEP)
    phase: str = ""
    next_rung: _NextRung | None = None


class _Evaluation(_Record):
    table: str = ""


class _Volume(BaseModel):
    """How the slices of a volume are laid out in its image, and what is known about the volume."""

    model_config = ConfigDict(allow_inf_nan=False)

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    grid: tuple[PositiveInt, PositiveInt, PositiveInt]
    columns: PositiveInt
    spacing_mm: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    orientation: str = Field(pattern=r"^[RL][AP][SI]$")
    name: str
    note: str


def read_run(path: Path, volume_budget: int = VOLUME_BUDGET_BYTES) -> dict[str, Any]:
    """Return everything that the page shows of one run; raise `UserError` if the folder is not a run."""
    run = RunFolder(path)
    if not os.path.isfile(run.config):
        raise UserError(f"{path}: no config.yaml; give the folder of a run, such as runs/quickstart")
    settings = load_settings(run.config)
    lines = _read_metrics(run.metrics)
    stages = [stage for stage in (_stage(run, settings, name, lines) for name in STAGES) if stage is not None]
    failure = _read_record(path / "oom_report.json", _OutOfMemory)
    is_past = failure and any(one["name"] == failure["stage"] and one["step"] > failure["step"] for one in stages)
    now, defaults = settings.model_dump(mode="json"), Settings().model_dump(mode="json")
    keys = [dotted for dotted, field in known_keys() if not is_section(field)]
    return {
        "name": settings.name,
        "folder": str(path),
        "stages": stages,
        "viewer": viewer_data(run, volume_budget),
        "config": [{"key": k, "value": _plain(look_up(now, k)), "default": _plain(look_up(defaults, k))} for k in keys],
        "environment": _read_record(run.environment, _Environment) or {},
        "evaluation": _read_record(run.evaluation, _Evaluation),
        "out_of_memory": None if is_past else failure,
    }


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def _stage(run: RunFolder, settings: Settings, stage: str, metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    lines = [line for line in metrics if line.get("stage") == stage]
    memory = _read_record(run.path / f"memory_{stage}.json", _Memory)
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
    is_line = isinstance(line, dict) and type(line.get("step")) is int and 0 <= line["step"] <= LARGEST_STEP
    return line if is_line else None


def viewer_data(run: RunFolder, budget: int) -> dict[str, Any]:
    """Return the sets of volumes for the slice viewer, newest first, and their images.

    The first column of the newest set of each stage is always included, all others while the budget allows. A column
    is a held-out volume with its reconstruction, or a sample with its neighbours.
    """
    columns: dict[tuple[str, int, int], list[re.Match[str]]] = {}
    for path in sorted(viewer_folder(run).glob("*.png")):
        if match := _NAME.fullmatch(path.name):
            columns.setdefault((match["stage"], int(match["step"]), int(match["place"])), []).append(match)
    newest = {stage: max(step for other, step, _ in columns if other == stage) for stage, *_ in columns}
    sets: dict[tuple[str, int], dict[str, Any]] = {}
    pictures: dict[str, int] = {}
    used = 0
    for stage, step, place in sorted(columns, key=lambda one: (one[1] != newest[one[0]], -one[1], one[2], one[0])):
        contents = {match["role"]: _content(viewer_folder(run) / match.string) for match in columns[stage, step, place]}
        sources = {r: f"data:image/png;base64,{base64.b64encode(c).decode('ascii')}" for r, c in contents.items()}
        # The inputs and the real volumes are the same images at every validation, so they are embedded only once.
        size = sum(map(len, {*sources.values()} - pictures.keys()))
        if (step != newest[stage] or place > 0) and used + size > budget:
            continue
        used += size
        for role, source in sources.items():
            if volume := _facts(contents[role]):
                volume["picture"] = pictures.setdefault(source, len(pictures))
                entry: dict[str, Any] = {"stage": stage, "step": step, "volumes": {}}
                sets.setdefault((stage, step), entry)["volumes"][role] = volume
    shown = sorted(sets.values(), key=lambda entry: -entry["step"])
    return {"sets": shown, "pictures": list(pictures)}


def _content(path: Path) -> bytes:
    """Return the bytes of a file; none if it cannot be read."""
    try:
        check_regular(path)
        return path.read_bytes()
    except OSError:
        return b""


def _facts(content: bytes) -> dict[str, Any] | None:
    """Return what a PNG says about its volume; None if it is damaged."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()
            facts = _Volume.model_validate_json(getattr(picture, "text", {})[FACTS])
            depth, height, width = facts.shape
            size = facts.columns * width, math.ceil(depth / facts.columns) * height
            return facts.model_dump() if picture.size == size else None
    except PICTURE_ERRORS:
        return None
