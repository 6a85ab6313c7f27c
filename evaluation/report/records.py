"""Read and validate the JSON files of a run; log damaged ones and leave them out, so that the rest can be shown."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.files.names import counted
from runtime.files.reading import check_regular, read_text, reason

log = logging.getLogger(__name__)

# Browsers represent larger integers inexactly.
LARGEST_STEP = 2**53


class _Record(BaseModel):
    """The fields that the page needs; other fields of the file are kept."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class Environment(_Record):
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


class _Rung(_Record):
    name: str
    state: str
    same_mathematics: bool


class MemoryRecord(_Record):
    """memory_<stage>.json."""

    prediction: _Prediction | None
    ladder: list[_Rung] | None = None


class _NextRung(_Record):
    name: str
    promise: str


class OutOfMemoryReport(_Record):
    """oom_report.json."""

    stage: str
    step: int = Field(ge=0, le=LARGEST_STEP)
    phase: str = ""
    next_rung: _NextRung | None = None


class Evaluation(_Record):
    """evaluation.json; the page shows a dash for what is missing inside."""

    reconstruction: dict[str, Any]
    conditions: dict[str, Any] | None = None
    samples: dict[str, Any] | None = None
    skill: dict[str, Any] = Field(default_factory=dict)
    anchors: dict[str, dict[str, Any]] = Field(default_factory=dict)


def read_record(path: Path, kind: type[_Record]) -> dict[str, Any] | None:
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
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
