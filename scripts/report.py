"""Rebuild the report of a run, or compare several runs on one page."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import at_least, check_output_file, parser, run
from settings import UserError

log = logging.getLogger("report")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/report.py --run runs/quickstart",
            "python scripts/report.py --run runs/quickstart --serve",
            "python scripts/report.py --run runs/first --run runs/second --out comparison.html",
        ],
    )
    result.add_argument(
        "--run",
        dest="runs",
        action="append",
        required=True,
        metavar="DIR",
        help="a run folder; repeat it to compare runs",
    )
    result.add_argument(
        "--out",
        metavar="FILE",
        help="page to write (default: report.html in the run folder, or comparison.html beside the run folders)",
    )
    result.add_argument("--predict", action="store_true", help="predict the memory of stages without a prediction")
    result.add_argument(
        "--serve", action="store_true", help="show the page on this machine and refresh it during training"
    )
    result.add_argument("--port", type=at_least(0), default=8008, help="port of --serve; 0: any (default: 8008)")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Write the page and print its path, or serve it until interrupted."""
    folders = [Path(name) for name in options.runs]
    for folder in folders:
        if not os.path.isfile(folder / "config.yaml"):
            raise UserError(f"{folder}: no config.yaml; give the folder of a run, such as runs/quickstart")
    if options.serve:
        from evaluation.report.server import serve

        serve(folders, options.port)
        return 0
    default = folders[0] / "report.html" if len(folders) == 1 else folders[0].resolve().parent / "comparison.html"
    target = default if options.out is None else Path(options.out)
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix != ".html"]
    check_output_file(default if options.out is None else options.out, "--out", files)
    try:
        from evaluation.report import write_comparison

        for folder in folders if options.predict else ():
            _add_predictions(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_comparison(folders, target)
    except OSError as error:
        raise UserError(
            f"{error.filename or target}: cannot be written ({error.strerror}); make it writable"
        ) from error
    log.info("%s", target)
    return 0


def _add_predictions(folder: Path) -> None:
    """Predict each stage that has begun and has no prediction, for the device that the run used."""
    from evaluation.report.run_data import read_run
    from memory.predict import predict
    from memory.watch.run_record import write_memory_record
    from settings import load_settings

    facts = read_run(folder)
    is_cpu = (facts["environment"].get("device") or "").startswith("cpu")
    settings = load_settings(folder / "config.yaml").with_overrides({"device.type": "cpu" if is_cpu else "cuda"})
    for stage in facts["stages"]:
        if stage["step"] > 0 and not (stage["memory"] or {}).get("prediction"):
            log.info("predicting %s", stage["name"])
            write_memory_record(folder, settings, stage["name"], predict(settings, stage["name"]))


if __name__ == "__main__":
    sys.exit(run(main, parse()))
