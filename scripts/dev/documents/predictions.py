"""The predictions behind every figure of the documents, kept in predictions.json so that tests need not repeat them."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memory.kernels.gpus import check_gpu
from memory.predict.prediction import GIB, Prediction, PredictionError, Predictor, Stage
from settings import Settings

PATH = Path(__file__).with_name("predictions.json")
NUM_WORKERS = 2
GPU = "RTX 4090"
"""The card for which all documents show hours."""


@dataclass(frozen=True)
class Figures:
    """What documents show of a prediction; bytes are GiB only when they are printed."""

    allocated: int
    reserved_default: int
    reserved_expandable: int
    required: int
    host: int
    flops: int
    hours: float
    phase: str
    other_phases: dict[str, int]

    @classmethod
    def of(cls, prediction: Prediction) -> Figures:
        """Return the figures of a prediction."""
        return cls(
            allocated=prediction.peak_allocated_bytes,
            reserved_default=prediction.peak_reserved_default_bytes,
            reserved_expandable=prediction.peak_reserved_expandable_bytes,
            required=prediction.required_bytes,
            host=prediction.host_bytes,
            flops=prediction.flops["total"],
            hours=round(prediction.hours(check_gpu(GPU)), 3),
            phase=prediction.phase,
            other_phases={name: peak["reserved_bytes"] for name, peak in prediction.run_peaks.items()},
        )


def question(settings: Settings, stage: Stage) -> str:
    """Return the name of a prediction: the stage and what differs from the defaults, so that a new key changes no name.

    Settings that the stage ignores are left out.
    """
    values = settings.model_dump(mode="json", exclude_defaults=True, exclude={"name", "seed"})
    grids = {name: values.get("data", {}).get(name) for name in ("voxel_size", "patch_size")}
    values["data"] = {name: grid for name, grid in grids.items() if grid is not None}
    if stage == "autoencoder":
        values.pop("ldm", None)
    return json.dumps({"stage": stage, **values}, sort_keys=True)


class Predictions:
    """Answers with figures: from the file, or, with a predictor, by predicting each config again, once."""

    def __init__(self, predictor: Predictor | None = None) -> None:
        self._predictor, self._threads = predictor, ThreadPoolExecutor(NUM_WORKERS)
        self._stored: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))["figures"]
        self._asked: dict[str, Future[Figures]] = {}

    def __call__(self, settings: Settings, stage: Stage = "autoencoder") -> Future[Figures]:
        """Return the future answer, so that several can be predicted at a time."""
        name = question(settings, stage)
        if name not in self._asked:
            self._asked[name] = self._answer(name, settings, stage)
        return self._asked[name]

    def _answer(self, name: str, settings: Settings, stage: Stage) -> Future[Figures]:
        if self._predictor is not None:
            predictor = self._predictor
            return self._threads.submit(lambda: Figures.of(predictor.predict(settings, stage)))
        if name not in self._stored:
            raise PredictionError(f"{PATH.name} has no prediction of {name}; run python -m scripts.dev.documents")
        answer: Future[Figures] = Future()
        answer.set_result(Figures(**self._stored[name]))
        return answer

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return all answers by question."""
        return {name: asdict(answer.result()) for name, answer in self._asked.items()}


class StoredLadder:
    """Stands for the predictor of a ladder that README shows, and answers from the file."""

    def __init__(self, *_: Any) -> None:
        self._stored: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))["ladder"]

    def __enter__(self) -> StoredLadder:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def submit(self, settings: Settings, stage: Stage) -> Future[Prediction]:
        """Return the finished answer."""
        answer: Future[Prediction] = Future()
        answer.set_result(Prediction.from_json(self._stored[question(settings, stage)]))
        return answer

    @staticmethod
    def kept(prediction: Prediction) -> dict[str, Any]:
        """Return what the file keeps of an answer: nothing that no ladder shows."""
        lists: dict[str, Any] = {"activations": [], "largest": [], "attention": []}
        return {**prediction.to_json(), **lists, "phase_peaks": {}, "breakdown": {}}


def stored_text(figures: dict[str, Any], ladder: dict[str, Any]) -> str:
    """Return the content of the file, a line for each answer."""
    blocks = []
    for section, answers in (("figures", figures), ("ladder", ladder)):
        lines = (f"{json.dumps(name)}:\n {json.dumps(answers[name])}" for name in sorted(answers))
        blocks.append(f'"{section}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def gib(nbytes: float, digits: int = 1) -> str:
    """Return a number of bytes in GiB, without the unit."""
    return f"{nbytes / GIB:.{digits}f}"
