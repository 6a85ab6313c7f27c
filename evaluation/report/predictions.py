"""Adds memory predictions to runs that have none."""

from __future__ import annotations

import logging
from pathlib import Path

from evaluation.report.run_data import read_run
from memory.predict import predict
from memory.watch.run_record import write_memory_record
from settings import load_settings

log = logging.getLogger(__name__)


def add_predictions(folder: Path) -> None:
    """Predict each stage that has begun and has no prediction, for the device that the run used."""
    found = read_run(folder)
    device = found["environment"].get("device") or "cuda"
    settings = load_settings(folder / "config.yaml")
    settings = settings.with_overrides({"device.type": "cpu" if device.startswith("cpu") else "cuda"})
    for stage in found["stages"]:
        if stage["step"] > 0 and not (stage["memory"] or {}).get("prediction"):
            log.info("predicting %s", stage["name"])
            write_memory_record(folder, settings, stage["name"], predict(settings, stage["name"]))
