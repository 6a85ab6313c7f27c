"""Compare this project with stock MONAI and a 3d_ldm-style loop: memory and time of a training step, as ratios."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import check_output_file, parser, run, write_output

PEAK_GRIDS = ((64, 64, 64), (128, 128, 64), (256, 256, 64), (512, 512, 128))
STEP_GRID, STEP_ROUNDS = (96, 96, 32), 3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/benchmark.py",
            "python scripts/benchmark.py --only peaks --json benchmark.json",
        ],
    )
    result.add_argument("--only", choices=("peaks", "steps"), help="measure only memory, or only whole steps")
    result.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure, then print the tables and write what was asked for."""
    if options.json is not None:
        check_output_file(options.json)
    import torch
    from tqdm import tqdm

    from evaluation.benchmarks.document import document_text
    from evaluation.benchmarks.measurements import measure_peaks, measure_steps

    # CPU seconds of several threads include the time that they wait for each other.
    torch.set_num_threads(1)
    processor = platform.processor() or platform.machine()
    machine = {"processor": processor, "torch": torch.__version__, "python": platform.python_version()}
    results: dict[str, Any] = {"machine": machine}
    with tqdm(unit="", leave=False, disable=options.quiet) as bar:

        def progress(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update(1)

        if options.only != "steps":
            results["peaks"] = measure_peaks(PEAK_GRIDS, progress)
        if options.only != "peaks":
            results["steps"] = measure_steps(STEP_GRID, STEP_ROUNDS, progress)
    if options.json is not None:
        write_output(Path(options.json), json.dumps(results, indent=1) + "\n")
    print(document_text(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
