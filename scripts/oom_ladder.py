"""Find out what to change in a config so that training fits a memory budget, and what each change costs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import OUT_OF_MEMORY, ProgressBar, above_zero, add_config, check_output_file, parser, run, write_output
from runtime.files import printable
from settings import ConfigError, Problem, UserError, load_settings

ROOT = Path(__file__).resolve().parent.parent
LARGEST_BUDGET_GB = 1_000_000
MOST_SECONDS = 600  # for measuring a rung
FITTED = " changed to fit "  # in the first line of every config that this command writes


def budget_bytes(text: str) -> int:
    """Read the memory of a GPU in GB."""
    if above_zero(text) > LARGEST_BUDGET_GB:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {LARGEST_BUDGET_GB} GB")
    return round(float(text) * 2**30)


def add_budget(target: argparse.ArgumentParser) -> None:
    """Add --budget-gb, which becomes `budget_bytes`, and --gpu."""
    text = "memory of the GPU in GB, for example 24"
    target.add_argument("--budget-gb", dest="budget_bytes", type=budget_bytes, required=True, metavar="N", help=text)
    text = 'GPU to predict the time for, such as "RTX 4090"; default: this machine\'s, or A100'
    target.add_argument("--gpu", metavar="NAME", help=text)


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
    add_budget(result)
    text = "stage to predict; default: autoencoder"
    result.add_argument("--stage", choices=("autoencoder", "ldm"), default="autoencoder", help=text)
    text = "lossless-first (default): changes that keep the mathematics come first; guide: as in the memory guide"
    result.add_argument("--order", choices=("lossless-first", "guide"), default="lossless-first", help=text)
    result.add_argument("--json", metavar="FILE", help="also write the rungs and the recommendation as JSON")
    result.add_argument("--write-config", metavar="FILE", help="write the recommended config, with reasons as comments")
    result.add_argument("--measure", action="store_true", help="CUDA only: also run a real step of each rung")
    return result.parse_intermixed_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Walk the ladder, print it and write the outputs; return 3 if nothing fits."""
    for option, path in (("--json", options.json), ("--write-config", options.write_config)):
        if path is not None:
            check_output_file(path, option, [options.config])
    out = Path(options.write_config) if options.write_config is not None else None
    if out is not None and out.is_file() and FITTED not in out.read_text(encoding="utf-8", errors="replace"):
        raise UserError(
            f"--write-config: {printable(out)} already exists and was not written by oom_ladder.py; new files and "
            "those that it wrote are allowed; choose another name"
        )
    settings = load_settings(options.config, options.overrides, stage=options.stage)
    if options.measure:
        import torch

        if not torch.cuda.is_available():
            remedy = "leave out --measure; predictions need no GPU"
            allowed = "allowed: on a machine with a GPU"
            raise ConfigError([Problem("--measure", "no CUDA device found", allowed, remedy)])
    from memory.kernels.gpus import chosen_gpu
    from memory.ladder.walk import config_with_reasons, describe_ladder, walk
    from memory.watch.calibration import corrected

    with ProgressBar(total=1, desc="predicting", unit="rung", leave=False) as bar:

        def advance(done: int, total: int, name: str) -> None:
            bar.total, bar.n = total, done  # the total shrinks when rungs turn out not to be needed
            bar.set_postfix_str(name)

        gpu, correct = chosen_gpu(options.gpu), partial(corrected, gpu_name=options.gpu)
        ladder = walk(settings, options.stage, options.budget_bytes, options.order, advance, correct, gpu)
        measured: dict[str, int] = {}
        for number, rung in enumerate((row.rung for row in ladder.rungs) if options.measure else (), start=1):
            measured |= _measured(rung, options.stage)
            advance(number, len(ladder.rungs), f"measured {rung.name}")
    if options.json is not None:
        values = ladder.to_json()
        for row in values["rungs"] if options.measure else ():
            row["measured_bytes"] = measured.get(row["name"])
        write_output(options.json, json.dumps(values, indent=2) + "\n")
    print(describe_ladder(ladder, measured if options.measure else None))
    if ladder.recommended is None:
        return OUT_OF_MEMORY
    if options.write_config is not None:
        # The file's name goes into a comment, so a line break in it must be escaped.
        write_output(options.write_config, config_with_reasons(ladder, printable(options.config)))
        print(f"written: {printable(options.write_config)}")
        print(f"next: python train_{options.stage}.py --config {shlex.quote(options.write_config)}")
    return 0


def _measured(rung: Any, stage: str) -> dict[str, int]:
    """Return what the allocator reserved in real updates of a rung, by its name; empty if they fail, as out of memory.

    They run in a process of their own, whose memory nothing else shares.
    """
    from evaluation.gpu_check import step_process, step_result

    try:
        found = step_result(step_process(), rung.settings, stage, limit=MOST_SECONDS, timed=0.0)
    except RuntimeError:
        return {}
    return {rung.name: max(found["first_peak_reserved_bytes"], found["peak_reserved_bytes"])}


if __name__ == "__main__":
    sys.exit(run(main, parse()))
