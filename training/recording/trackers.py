"""Weights & Biases and MLflow, imported only when the settings ask for them."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from typing import Any

import numpy as np

from runtime.files.run_folder import RunFolder
from settings import LoggingSettings, Settings, UserError


def check_trackers(settings: LoggingSettings) -> None:
    """Raise `UserError` if a package that the settings ask for is missing, or a server is asked for but not named."""
    name, is_offline = _chosen(settings)
    if name == "none":
        return
    spec = importlib.util.find_spec(name)
    # A folder of that name, such as the one that wandb writes, is found as a package without an origin.
    if spec is None or spec.origin is None:
        raise UserError(
            f"logging.tracker: {settings.tracker}, but the package is missing; pip install {name}, or set none"
        )
    if name == "mlflow" and not is_offline and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise UserError(
            "logging.tracker: mlflow needs the address of a server; set MLFLOW_TRACKING_URI, or mlflow-offline"
        )


def _chosen(settings: LoggingSettings) -> tuple[str, bool]:
    """Return the package, and whether it writes to the run folder instead of a server."""
    name, _, offline = settings.tracker.partition("-")
    return name, bool(offline)


def open_trackers(settings: Settings, run: RunFolder, stage: str, first_step: int) -> list[Tracker]:
    """Return the trackers that the settings ask for; call this in the first process only."""
    name, is_offline = _chosen(settings.logging)
    if name == "none":
        return []
    kind = _Wandb if name == "wandb" else _MLflow
    return [kind(settings, run, stage, first_step, is_offline)]


class _Wandb:
    """One Weights & Biases run per stage and start; offline runs stay in the run folder until `wandb sync`.

    A resumed run is a new one in the same group, because Weights & Biases does not accept steps twice.
    """

    def __init__(self, settings: Settings, run: RunFolder, stage: str, first_step: int, is_offline: bool) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        resumed = f" from step {first_step}" if first_step else ""
        self._run = self._wandb.init(
            name=f"{settings.name} {stage}{resumed}",
            group=settings.name,
            job_type=stage,
            dir=str(run.path),
            mode="offline" if is_offline else "online",
            config=settings.model_dump(mode="json"),
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=step)

    def close(self, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


class _MLflow:
    """One MLflow run per stage and start, in an experiment named like the run."""

    def __init__(self, settings: Settings, run: RunFolder, stage: str, first_step: int, is_offline: bool) -> None:
        tracking = importlib.import_module("mlflow.tracking")
        folder = run.path.resolve()
        address = f"sqlite:///{folder / 'mlflow.db'}" if is_offline else os.environ["MLFLOW_TRACKING_URI"]
        self._client: Any = tracking.MlflowClient(tracking_uri=address)
        known = self._client.get_experiment_by_name(settings.name)
        artifacts = (folder / "mlflow").as_uri() if is_offline else None
        experiment = known.experiment_id if known else self._client.create_experiment(settings.name, artifacts)
        resumed = f" from step {first_step}" if first_step else ""
        self._id = self._client.create_run(experiment, run_name=f"{stage}{resumed}").info.run_id
        self._client.log_dict(self._id, settings.model_dump(mode="json"), "config.json")

    def log(self, step: int, values: dict[str, float]) -> None:
        # SQL databases cannot store NaN; metrics.jsonl has every value.
        for name, value in values.items():
            if math.isfinite(value):
                self._client.log_metric(self._id, name, value, step=step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._client.log_image(self._id, pixels, f"{name}_{step:08d}.png")

    def close(self, is_complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_complete else "FAILED")


Tracker = _Wandb | _MLflow
"""Receives what a run logs."""
