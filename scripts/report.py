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
    text = "a run folder; repeat it to compare runs"
    result.add_argument("--run", dest="runs", action="append", required=True, metavar="DIR", help=text)
    text = "page to write (default: report.html in the run folder, or comparison.html beside the run folders)"
    result.add_argument("--out", metavar="FILE", help=text)
    text = "show the page on this machine and refresh it during training"
    result.add_argument("--serve", action="store_true", help=text)
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
    out = options.out
    if out is None:
        out = folders[0] / "report.html" if len(folders) == 1 else folders[0].resolve().parent / "comparison.html"
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix != ".html"]
    check_output_file(out, "--out", files)
    from evaluation.report import write_comparison

    target = Path(out)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_comparison(folders, target)
    except OSError as error:
        raise UserError(f"{error.filename or out}: cannot be written ({error.strerror}); make it writable") from error
    log.info("%s", target)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
