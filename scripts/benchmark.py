"""Compare a training step of this project with stock MONAI: memory and compute, as ratios."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import ProgressBar, check_output_file, parser, run, write_output

GRIDS = ((64, 64, 64), (128, 128, 64), (256, 256, 64), (512, 512, 128))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python scripts/benchmark.py", "python scripts/benchmark.py --json benchmark.json"])
    result.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Predict every variant on every grid, then print the document and write the figures."""
    if options.json is not None:
        check_output_file(options.json)
    from evaluation.benchmarks import document_text, measure_peaks

    with ProgressBar(unit="", leave=False) as bar:

        def progress(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update(1)

        rows = measure_peaks(GRIDS, progress)
    if options.json is not None:
        write_output(Path(options.json), json.dumps({"peaks": rows}, indent=1) + "\n")
    print(document_text(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
