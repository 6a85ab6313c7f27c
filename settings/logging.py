"""Where else a run is logged, besides metrics.jsonl, TensorBoard and the report."""

from __future__ import annotations

from typing import Literal

from settings.section import FREE, Section, key

Mode = Literal["none", "offline", "online"]


class LoggingSettings(Section):
    """The `logging` section."""

    wandb: Mode = key("none", "Weights & Biases; offline: files in the run folder, to upload with wandb sync.", FREE)
    mlflow: Mode = key("none", "MLflow; offline: mlflow.db in the run folder; online: at MLFLOW_TRACKING_URI.", FREE)
