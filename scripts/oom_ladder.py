"""Find out what to change in a config so that training fits a memory budget, and what each change costs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import OUT_OF_MEMORY, add_config, check_output_file, parser, run, write_output
from runtime.files import printable
from settings import ConfigError, Problem, load_settings

if TYPE_CHECKING:
    from memory.ladder.walk import Ladder

LARGEST_BUDGET_GB = 1_000_000


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/oom_ladder.py --config configs/quality.yaml --budget-gb 6",
            "python scripts/oom_ladder.py --config configs/high_res.yaml --budget-gb 2 --write-config fits.yaml",
            "python scripts/oom_ladder.py --config configs/balanced.yaml --budget-gb 12 --order guide",
        ],
    )
    add_config(result)
    result.add_argument(
        "--budget-gb", type=float, required=True, metavar="N", help="memory of the GPU in GB, for example 24"
    )
    result.add_argument(
        "--stage", choices=("autoencoder", "ldm"), default="autoencoder", help="stage to predict; default: autoencoder"
    )
    result.add_argument(
        "--order",
        choices=("lossless-first", "guide"),
        default="lossless-first",
        help="lossless-first (default): changes that keep the mathematics come first; guide: as in the memory guide",
    )
    result.add_argument(
        "--gpu",
        metavar="NAME",
        help='GPU to predict the time for, such as "RTX 4090"; default: this machine\'s, or A100',
    )
    result.add_argument("--json", metavar="FILE", help="also write the rungs and the recommendation as JSON")
    result.add_argument("--write-config", metavar="FILE", help="write the recommended config, with reasons as comments")
    result.add_argument("--measure", action="store_true", help="CUDA only: also run a real step of each rung")
    return result.parse_intermixed_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Walk the ladder, print it and write the outputs; return 3 if nothing fits."""
    for option, path in (("--json", options.json), ("--write-config", options.write_config)):
        if path is not None:
            check_output_file(path, option, [options.config])
    settings = load_settings(options.config, options.overrides, stage=options.stage)
    _check(options)
    from memory.kernels.gpus import chosen_gpu
    from memory.ladder.text import config_with_reasons, describe_ladder
    from memory.ladder.walk import walk
    from memory.predict.prediction import GIB
    from memory.watch.calibration import corrected
    from runtime.cli.bars import ProgressBar

    budget_bytes = round(options.budget_gb * GIB)
    with ProgressBar(total=1, desc="predicting", unit="rung", disable=options.quiet, leave=False) as bar:

        def advance(done: int, total: int, name: str) -> None:
            bar.total, bar.n = total, done  # the total shrinks when rungs turn out not to be needed
            bar.set_postfix_str(name)

        gpu = chosen_gpu(options.gpu)
        correct = partial(corrected, gpu_name=options.gpu)
        ladder = walk(settings, options.stage, budget_bytes, options.order, advance, correct, gpu)
        measured = _measure(ladder, advance) if options.measure else None
    if options.json is not None:
        values = ladder.to_json()
        if measured is not None:
            for rung in values["rungs"]:
                rung["measured_bytes"] = measured.get(rung["name"])
        write_output(options.json, json.dumps(values, indent=2) + "\n")
    print(describe_ladder(ladder, measured))
    if ladder.recommended is None:
        return OUT_OF_MEMORY
    if options.write_config is not None:
        # The file's name goes into a comment, so a line break in it must be escaped.
        write_output(options.write_config, config_with_reasons(ladder, printable(options.config)))
        print(f"written: {printable(options.write_config)}")
        print(f"next: python train_{options.stage}.py --config {shlex.quote(options.write_config)}")
    return 0


def _check(options: argparse.Namespace) -> None:
    problems = []
    if not 0 < options.budget_gb <= LARGEST_BUDGET_GB:
        allowed = f"allowed: above 0, at most {LARGEST_BUDGET_GB}"
        problems.append(Problem("--budget-gb", f"found {options.budget_gb:g}", allowed, "for example 24"))
    if options.measure:
        import torch

        if not torch.cuda.is_available():
            remedy = "leave out --measure; predictions need no GPU"
            problems.append(Problem("--measure", "no CUDA device found", "allowed: on a machine with a GPU", remedy))
    if problems:
        raise ConfigError(problems)


def _measure(ladder: Ladder, advance: Callable[[int, int, str], None]) -> dict[str, int]:
    """Run a real step of each rung in its own process; return the bytes that the allocator reserved, by rung."""
    from memory.ladder.measured_step import measure_in_process

    measured = {}
    for number, predicted in enumerate(ladder.rungs, start=1):
        rung = predicted.rung
        peak = measure_in_process(rung.settings, ladder.stage)
        if peak is not None:
            measured[rung.name] = peak
        advance(number, len(ladder.rungs), f"measured {rung.name}")
    return measured


if __name__ == "__main__":
    sys.exit(run(main, parse()))
