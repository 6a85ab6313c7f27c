"""Publish a validation: metrics in the log, a preview image, volumes for the viewer, and an updated report."""

from __future__ import annotations

import logging

from evaluation.report.charts import STAGE_TITLES
from evaluation.report.page import publish
from training.recording.recorder import Recorder
from training.validation.pictures import save_picture
from training.validation.previews import Preview, save_viewer_volumes

log = logging.getLogger(__name__)

PICTURES = {"autoencoder": "reconstruction", "ldm": "samples"}
"""The names of the stages' pictures in TensorBoard."""


def show_validation(recorder: Recorder, step: int, metrics: dict[str, float], preview: Preview | None) -> None:
    """Save the preview as PNG, to TensorBoard and for the report, log the metrics, and write the report.

    The metrics are written after the preview, because their line marks the validation of this step as complete.
    """
    if preview is not None and recorder.process.is_rank_zero:
        path = recorder.run.previews / f"{recorder.stage}_{step:08d}.png"
        title = f"{recorder.run.path.name}, {STAGE_TITLES[recorder.stage].lower()}, step {step:,}"
        recorder.image(step, PICTURES[recorder.stage], save_picture(path, preview.picture, title))
        save_viewer_volumes(recorder.run, recorder.stage, step, preview.volumes)
        log.info("step %d: %s; preview %s", step, ", ".join(f"{n} {v:.4g}" for n, v in metrics.items()), path)
    recorder.write(step, metrics)
    publish(recorder.run, recorder.process)
