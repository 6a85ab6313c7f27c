"""Measure real steps on this machine, and keep the figures beside their predictions in docs/measured.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.cli import parser, run
from scripts.dev.measured.record import PATH, keep, read
from settings import ConfigError, Problem

WHAT = ("allocator", "resident")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/dev/measure_predictions.py resident",
            "python scripts/dev/measure_predictions.py allocator --only high_res",
        ],
    )
    result.add_argument(
        "what",
        choices=WHAT,
        help="allocator: torch's CUDA allocators; resident: memory of CPU steps",
    )
    result.add_argument("--only", default="", metavar="TEXT", help="only the rows with this text in their name")
    result.add_argument(
        "--without-workspaces", action="store_true", help="allocator: the device has no workspaces of convolutions"
    )
    result.add_argument(
        "--only-predict", action="store_true", help="allocator: predict the kept rows again, without a CUDA device"
    )
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure, print and keep each row."""
    for row in _rows(options):
        print(json.dumps(row), flush=True)
        keep(options.what, row)
    print(f"{PATH}: kept; run python scripts/dev/prediction_table.py to show it")
    return 0


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.what == "allocator":
        import torch

        from scripts.dev.measured import allocator

        if options.only_predict:
            for name, (settings, stage) in allocator.variants().items():
                if options.only in name and name in (kept := read("allocator")):
                    yield allocator.predicted_again(kept[name], name, settings, stage, not options.without_workspaces)
            return
        if not torch.cuda.is_available():
            problem = Problem("allocator", "no CUDA device found", "allowed: with one", "measure another part")
            raise ConfigError([problem])
        for name, (settings, stage) in allocator.variants().items():
            if options.only in name:
                yield allocator.compare(name, settings, stage, not options.without_workspaces)
    else:
        from scripts.dev.measured import resident

        names = [name for name in resident.VARIANTS if options.only in name]
        for row in resident.measure([(name, resident.GRID) for name in names]):
            yield {name: value for name, value in row.items() if name != "prediction"}


if __name__ == "__main__":
    sys.exit(run(main, parse()))
