"""Walk from a config towards a memory budget: what to change, what it costs, what fits."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import OUT_OF_MEMORY, add_config, check_output_file, parser, run
from settings import ConfigError, Problem, load_settings
from storage.names import printable

if TYPE_CHECKING:
    from memory.ladder.walk import Ladder

GIB = 1 << 30
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
    result.add_argument("--budget-gb", type=float, required=True, metavar="N", help="memory of the GPU, as sold: 24")
    result.add_argument("--stage", choices=("autoencoder", "ldm"), default="autoencoder", help="default: autoencoder")
    result.add_argument(
        "--order",
        choices=("lossless-first", "guide"),
        default="lossless-first",
        help="lossless-first (default): the same mathematics before anything else; guide: the memory guide's order",
    )
    result.add_argument("--json", metavar="FILE", help="write rungs and recommendation for programs")
    result.add_argument("--write-config", metavar="FILE", help="write the recommended config, with the reasons")
    result.add_argument("--measure", action="store_true", help="CUDA only: run each rung's real step as well")
    return result.parse_intermixed_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Walk, print, write; 3 when nothing fits."""
    for option, path in (("--json", options.json), ("--write-config", options.write_config)):
        if path is not None:
            check_output_file(path, option)
    settings = load_settings(options.config, options.overrides, stage=options.stage)
    _check(options)
    from memory.ladder.text import config_with_reasons, describe_ladder
    from memory.ladder.walk import walk
    from memory.watch.calibration import corrected

    budget_bytes = round(options.budget_gb * GIB)
    with _ProgressBar(options.quiet) as bar:
        ladder = walk(settings, options.stage, budget_bytes, options.order, bar.advance, corrected)
        measured = _measure(ladder, bar) if options.measure else None
    if options.json is not None:
        values = ladder.to_json()
        for rung in values["rungs"] if measured is not None else []:
            rung["measured_bytes"] = measured.get(rung["name"]) if measured is not None else None
        _write(options.json, json.dumps(values, indent=2) + "\n")
    print(describe_ladder(ladder, measured))
    if ladder.recommended is None:
        return OUT_OF_MEMORY
    if options.write_config is not None:
        # The file's name goes into a comment, so a line break in it must be escaped.
        _write(options.write_config, config_with_reasons(ladder, printable(options.config)))
        print(f"written: {options.write_config}")
    return 0


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def _check(options: argparse.Namespace) -> None:
    problems = []
    if not 0 < options.budget_gb <= LARGEST_BUDGET_GB:
        allowed = f"allowed: above 0, at most {LARGEST_BUDGET_GB}"
        problems.append(Problem("--budget-gb", f"found {options.budget_gb:g}", allowed, "for example 24"))
    if options.measure:
        import torch

        if not torch.cuda.is_available():
            remedy = "leave --measure away: the predictions need no GPU"
            problems.append(Problem("--measure", "no CUDA device here", "allowed: on a machine with a GPU", remedy))
    if problems:
        raise ConfigError(problems)


def _measure(ladder: Ladder, bar: _ProgressBar) -> dict[str, int]:
    """Run the real step of each rung in a process of its own; return what the allocator reserved, by rung."""
    from memory.ladder.measured_step import measure_in_process

    measured = {}
    for number, predicted in enumerate(ladder.rungs, start=1):
        rung = predicted.rung
        reserved = measure_in_process(rung.settings, ladder.stage)
        if reserved is not None:
            measured[rung.name] = reserved
        bar.advance(number, len(ladder.rungs), f"measured {rung.name}")
    return measured


class _ProgressBar:
    """A bar on standard error; rungs that turn out not to matter shorten it."""

    def __init__(self, quiet: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=1, desc="predicting", unit="rung", disable=quiet, leave=False)

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self, done: int, total: int, name: str) -> None:
        self._bar.total, self._bar.n = total, done
        self._bar.set_postfix_str(name)


if __name__ == "__main__":
    sys.exit(run(main, parse()))
