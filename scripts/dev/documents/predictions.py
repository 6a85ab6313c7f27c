"""Predicts what documents show, each config once."""

from __future__ import annotations

from concurrent.futures import Future

from memory.kernels.gpus import check_gpu
from memory.predict.prediction import GIB, Prediction, Predictor, Stage
from settings import Settings

NUM_WORKERS = 2
GPU = "RTX 4090"
"""The card for which all documents show hours."""


class Predictions:
    """Answers what a config needs; configs that differ in what their stage ignores share a prediction."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._asked: dict[tuple[Stage, str], Future[Prediction]] = {}

    def __call__(self, settings: Settings, stage: Stage = "autoencoder") -> Future[Prediction]:
        """Return the future answer, so that several can be predicted at a time."""
        key = (stage, settings.model_dump_json(exclude={"name", "seed", *(["ldm"] if stage == "autoencoder" else [])}))
        if key not in self._asked:
            self._asked[key] = self._predictor.submit(settings, stage)
        return self._asked[key]


def hours(prediction: Prediction) -> str:
    """Return the hours of a run."""
    return f"{prediction.hours(check_gpu(GPU)):.1f}"


def gib(nbytes: float, digits: int = 1) -> str:
    """Return a number of bytes in GiB, without the unit."""
    return f"{nbytes / GIB:.{digits}f}"


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table; columns whose names end in a colon hold numbers."""
    head = [f"| {' | '.join(column.removesuffix(':') for column in columns)} |"]
    head += ["|" + "".join("---:|" if column.endswith(":") else "---|" for column in columns)]
    return "".join(f"{line}\n" for line in [*head, *(f"| {' | '.join(row)} |" for row in rows)])
