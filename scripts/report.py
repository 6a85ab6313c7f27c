"""Rebuild the report page of a run, or put several runs on one page to compare them."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from settings import UserError, load_settings
from settings.command_line import parser, run

log = logging.getLogger("report")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/report.py --run runs/quickstart",
            "python scripts/report.py --run runs/quickstart --predict",
            "python scripts/report.py --run runs/first --run runs/second --out comparison.html",
        ],
    )
    result.add_argument(
        "--run", dest="runs", action="append", required=True, metavar="DIR", help="a run; again: compare"
    )
    result.add_argument("--out", metavar="FILE", help="default: report.html in the run, or comparison.html beside them")
    result.add_argument("--predict", action="store_true", help="predict the memory of stages that have no prediction")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Write the page and name it."""
    folders = [Path(name) for name in options.runs]
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder}: no config.yaml; give the folder of a run, such as runs/quickstart")
    if options.predict:
        for folder in folders:
            _predict(folder)
    from training.report import write_comparison, write_report

    if len(folders) == 1 and not options.out:
        target = write_report(folders[0])
    else:
        target = write_comparison(folders, options.out or folders[0].resolve().parent / "comparison.html")
    log.info("%s", target)
    return 0


def _predict(folder: Path) -> None:
    """Add memory records where the run has none, for the device that the run had."""
    import json

    from memory import predict
    from memory.run_record import write_memory_record

    settings = load_settings(folder / "config.yaml")
    try:
        device = json.loads((folder / "environment.json").read_text())["device"]
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        device = "cuda"
    settings = settings.with_overrides({"device.type": "cpu" if device.startswith("cpu") else "cuda"})
    metrics = folder / "metrics.jsonl"
    text = metrics.read_text() if metrics.is_file() else ""
    for stage in ("autoencoder", "ldm"):
        record = folder / f"memory_{stage}.json"
        is_known = record.is_file() and json.loads(record.read_text())["prediction"] is not None
        if f'"stage": "{stage}"' in text and not is_known:
            log.info("predicting %s", stage)
            write_memory_record(folder, settings, stage, predict(settings, stage))


if __name__ == "__main__":
    sys.exit(run(main, parse()))
