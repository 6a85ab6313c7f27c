"""Compare this project with stock MONAI and a 3d_ldm-style loop: memory, speed, start-up and encoding."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import check_output_file, check_output_folder, parser, run, write_output
from settings import ConfigError

ROOT = Path(__file__).resolve().parent.parent
log = logging.getLogger("benchmark")
PARTS = ("peaks", "steps", "encoding", "start")

WHOLE: dict[str, Any] = {
    "peak_grids": [(64, 64, 64), (128, 128, 64), (256, 256, 64), (512, 512, 128)],
    "step_grid": (96, 96, 32),
    "step_rounds": 3,
    "encoding_rounds": 5,
    "start_rounds": 3,
}
QUICK: dict[str, Any] = {
    "peak_grids": [(64, 64, 64)],
    "step_grid": (32, 32, 16),
    "step_rounds": 1,
    "encoding_rounds": 1,
    "start_rounds": 1,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/benchmark.py --quick",
            "python scripts/benchmark.py --docs",
            "python scripts/benchmark.py --only steps --only start --json benchmark.json",
        ],
    )
    result.add_argument("--quick", action="store_true", help="use tiny sizes, only to check that everything works")
    result.add_argument(
        "--only",
        action="append",
        choices=PARTS,
        metavar="PART",
        help=f"measure only this part; may be repeated: {', '.join(PARTS)}",
    )
    result.add_argument(
        "--json", metavar="FILE", help="where to write the results (default: benchmark.json in the output folder)"
    )
    result.add_argument(
        "--out", default="runs/benchmark", metavar="DIR", help="folder for tables and plots (default: runs/benchmark)"
    )
    result.add_argument("--docs", action="store_true", help="also write docs/benchmarks.md and its pictures")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure part by part, write JSON after each, then write tables and plots."""
    check_output_folder(options.out)
    if options.json is not None:
        check_output_file(options.json)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "benchmark.json" if options.json is None else Path(options.json)
    sizes = QUICK if options.quick else WHOLE
    if options.docs and options.quick:
        raise ConfigError(
            "--docs: given with --quick, whose figures mean nothing; allowed: one of them; leave out --quick"
        )
    import torch

    # CPU seconds of several threads include the time that they wait for each other.
    torch.set_num_threads(1)
    start = time.perf_counter()
    results: dict[str, Any] = {"is_quick": options.quick, "machine": _machine()}
    for part in options.only or PARTS:
        results[part] = measure(part, sizes)
        results["seconds"] = round(time.perf_counter() - start, 1)
        write_output(path, json.dumps(results, indent=1) + "\n")
    from evaluation.benchmarks.document import write_document

    document = write_document(results, out)
    print(document.read_text())
    if options.docs:
        _update_docs(results)
    log.info("%s and %s, %.0f s", path, document, results["seconds"])
    return 0


def _update_docs(results: dict[str, Any]) -> None:
    """Put the parts that were measured into docs/benchmarks.json and write the document from all of it."""
    from evaluation.benchmarks.document import write_document

    path = ROOT / "docs" / "benchmarks.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    results = {**known, **{name: value for name, value in results.items() if name != "seconds"}}
    path.write_text(json.dumps(results, indent=1) + "\n")
    log.info("%s", write_document(results, ROOT / "docs", ROOT / "docs" / "images"))


def measure(part: str, sizes: dict[str, Any]) -> Any:
    """Return the results of one part."""
    from tqdm import tqdm

    from evaluation.benchmarks import peaks, speed

    with tqdm(desc=part, unit="", leave=False) as bar:

        def progress(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update(1)

        if part == "peaks":
            return peaks.measure_peaks(sizes["peak_grids"], progress)
        if part == "steps":
            return speed.step_times(sizes["step_grid"], sizes["step_rounds"], progress)
        if part == "encoding":
            return speed.encoding_rates(sizes["step_grid"], sizes["encoding_rounds"], progress)
        return speed.start_up(sizes["start_rounds"], progress)


def _machine() -> dict[str, Any]:
    import platform

    import torch

    return {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(run(main, parse()))
