"""The predictions behind every figure of the documents, in docs/predictions.json.

The commands that write a figure keep its prediction there. Tests regenerate the documents from it verbatim, and
repeat some of the predictions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from memory.predict.prediction import Prediction, PredictionError, Predictor, Stage
from settings import Settings

PATH = Path(__file__).resolve().parents[3] / "docs" / "predictions.json"
VALUES = (
    "tier",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_reserved_default_bytes",
    "peak_reserved_expandable_bytes",
    "host_bytes",
    "phase",
    "margin",
    "flops",
    "workspace_bytes",
    "traffic_bytes",
    "kernels",
    "run_peaks",
    "max_steps",
)
TIMED = ("work", "beside", "num_validations", "num_volumes")
WITH_WORK = ("presets", "readme")
"""Sections whose documents show times and therefore keep the work of a run, too."""
Answers = dict[str, dict[str, Any]]


def question(settings: Settings, stage: Stage, has_matrix: bool = False) -> str:
    """Return the name of a prediction: the stage and what differs from the defaults, so that a new key changes no name.

    Settings that the stage ignores are left out.
    """
    values = settings.model_dump(mode="json", exclude_defaults=True, exclude={"name", "seed"})
    grids = {name: values.get("data", {}).get(name) for name in ("voxel_size", "patch_size")}
    values["data"] = {name: grid for name, grid in grids.items() if grid is not None}
    if stage == "autoencoder":
        values.pop("ldm", None)
    elif not settings.ldm.conditioning.is_used:
        values.get("ldm", {}).pop("conditioning", None)
    return json.dumps({"stage": stage, **({"attention": "matrix"} if has_matrix else {}), **values}, sort_keys=True)


def kept(answer: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return what a section keeps of an answer; of the compute only the sum."""
    flops = answer["flops"]["total"] if isinstance(answer["flops"], Mapping) else answer["flops"]
    values = (*VALUES, *TIMED) if section in WITH_WORK else VALUES
    return {name: answer[name] for name in values if name in answer} | {"flops": flops}


def read(section: str) -> Answers:
    """Return the answers of one section by question."""
    return json.loads(PATH.read_text(encoding="utf-8"))[section]


def write(section: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace one section of the file."""
    PATH.write_text(updated({section: answers}), encoding="utf-8")


def updated(changed: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the file's text with some sections replaced, a line for each question and each answer."""
    sections = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
    for section, answers in changed.items():
        sections[section] = {name: kept(answer, section) for name, answer in answers.items()}
    blocks = [f"{json.dumps(name)}: {_block(sections[name])}" for name in sorted(sections)]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _block(answers: Answers) -> str:
    lines: Iterable[str] = (f"{json.dumps(name)}:\n  {json.dumps(answers[name])}" for name in sorted(answers))
    return "{\n" + ",\n".join(lines) + "\n}"


class RecordingPredictor(Predictor):
    """Predicts, and remembers what it answered."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers)
        self.answers: dict[str, Mapping[str, Any]] = {}

    def predict(self, settings: Settings, stage: Stage) -> Prediction:
        """Return the prediction."""
        prediction = super().predict(settings, stage)
        self.answers[question(settings, stage)] = prediction.to_json()
        return prediction


class StoredPredictor:
    """Answers from the file what a predictor would compute; what is not there is an error."""

    def __init__(self, section: str) -> None:
        self.section, self.answers = section, read(section)

    def __enter__(self) -> StoredPredictor:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def submit(self, settings: Settings, stage: Stage) -> Future[Prediction]:
        """Return the finished answer."""
        return self.find(question(settings, stage))

    def find(self, name: str) -> Future[Prediction]:
        """Return the finished answer to a question."""
        if name not in self.answers:
            raise PredictionError(f"{PATH.name}, {self.section}: no prediction of {name}; write the documents again")
        found: Future[Prediction] = Future()
        values = dict(self.answers[name])
        total = {"total": values.pop("flops")}
        blank: dict[str, Any] = {"phase_peaks": {}, "breakdown": {}, "activations": [], "largest": []}
        # Each section keeps what its document shows; a matrix of attention is known by its peak only.
        blank |= {"peak_reserved_bytes": 0, "peak_reserved_default_bytes": 0, "peak_reserved_expandable_bytes": 0}
        blank |= {"tier": "", "phase": "", "margin": 0.0}
        stage = json.loads(name)["stage"]
        found.set_result(Prediction(**{**blank, **values}, stage=stage, flops=total, seconds=0.0))
        return found
