"""Write one run, or a comparison of several, as a single self-contained HTML file; after a validation, its previews."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.report import sections
from evaluation.report.charts import STAGE_TITLES, curve_charts, memory_charts
from evaluation.report.run_data import VOLUME_BUDGET_BYTES, read_run
from runtime.files import RunFolder, write_text
from runtime.processes import Process
from settings import UserError
from training.recording import Recorder
from training.validation.previews import Preview, save_picture, save_viewer_volumes

log = logging.getLogger(__name__)

_TEMPLATE = Path(__file__).resolve().parent / "template"
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


def publish(run: RunFolder, process: Process) -> None:
    """Write the report of a running training from rank zero; an error is logged and does not end the training."""
    if process.is_rank_zero:
        try:
            write_report(run.path)
        except (OSError, UserError, ValueError, LookupError) as error:
            why = f"{type(error).__name__}: {error}"
            log.warning("%s: not written (%s); the next validation, or scripts/report.py, tries again", run.report, why)


def write_report(run_folder: Path) -> Path:
    """Write report.html from the current files of the run; cheap enough to call after each validation."""
    return write_comparison([run_folder], RunFolder(run_folder).report)


def write_comparison(run_folders: Sequence[Path], target: Path) -> Path:
    """Write one page for one or several runs, with their curves on the same axes."""
    write_text(target, page_of(run_folders))
    return target


def page_of(run_folders: Sequence[Path], version: str = "") -> str:
    """Return the page of one or several runs; a page with a version asks its server for newer ones.

    All outside text is escaped in Python; the page's script only sets text, never markup. A served page also takes
    over the escaped sections of its newer versions.
    """
    runs = [read_run(folder, VOLUME_BUDGET_BYTES // len(run_folders)) for folder in run_folders]
    names = [run["name"] for run in runs]
    for run in runs:
        run["label"] = run["name"] if names.count(run["name"]) == 1 else run["folder"]
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    parts = {
        "title": sections.escaped(" vs. ".join(run["label"] for run in runs)),
        "connect": "'self'" if version else "'none'",
        "style": _part("style.css"),
        "script": _part("charts.js") + _part("viewer.js") + (_part("live.js") if version else ""),
        "header": sections.header_section(runs, written, is_live=bool(version)),
        "tiles": sections.tiles_section(runs),
        "evaluation": sections.evaluation_section(runs),
        "memory": sections.memory_section(runs),
        "config": sections.config_section(runs),
        "environment": sections.environment_section(runs),
        "data": _embedded({**_page_data(runs), "live": version}),
    }
    pieces = _part("page.html").split("[[")
    # A single pass, so that placeholders inside inserted text are never filled in.
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("]]") for piece in pieces[1:]))


def _page_data(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sets: list[dict[str, Any]] = []
    pictures: list[str] = []
    for run in runs:
        for entry in run["viewer"]["sets"]:
            volumes = {
                role: {**volume, "picture": volume["picture"] + len(pictures)}
                for role, volume in entry["volumes"].items()
            }
            label = f"{run['label']}, " if len(runs) > 1 else ""
            sets.append({**entry, "volumes": volumes, "label": label})
        pictures += run["viewer"]["pictures"]
    return {"curves": curve_charts(runs), "memory": memory_charts(runs), "sets": sets, "pictures": pictures}


def _part(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


def _embedded(values: Any) -> str:
    """Return JSON that cannot close the script element that contains it."""
    return json.dumps(values, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
