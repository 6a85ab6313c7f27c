"""Where else a run is logged, besides metrics.jsonl, TensorBoard and the report."""

from __future__ import annotations

from typing import Literal

from settings.section import FREE, Section, key


class LoggingSettings(Section):
    """The `logging` section."""

    tracker: Literal["none", "wandb", "wandb-offline", "mlflow", "mlflow-offline"] = key(
        "none",
        "wandb: Weights & Biases; wandb-offline: its files in the run folder, to upload with wandb sync; mlflow: "
        "MLflow at MLFLOW_TRACKING_URI; mlflow-offline: mlflow.db in the run folder.",
        FREE,
    )
