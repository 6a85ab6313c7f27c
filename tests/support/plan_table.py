"""Write docs/plans.md: the plans for five data sets and four budgets, with what each uses of its budget."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memory.predict.prediction import GIB
from runtime.cli import parser, run
from settings import DataSettings

if TYPE_CHECKING:
    from memory.planning.plan import Plan
    from memory.predict import Predictor

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "plans.md"
NAMES = ("CT", "MR", "thick slices", "small crops", "two channels")
BUDGETS = (6, 12, 24, 48)
GPU = "RTX 4090"

_INTRODUCTION = f"""# Plans

Written by `python tests/support/plan_table.py`; do not edit by hand.

What `scripts/plan.py` recommends for five generated data sets and four budgets. Every plan is validated and fits with
its margin. Shares are what a stage needs of the budget without its margin, which the predictor adds on top. A stage
that needs less than 75 % has its reason below the table. Hours are a lower bound for all updates on an {GPU}. "Asked"
counts the predictions that a plan needed besides those that it shares with smaller budgets.
"""
_COLUMNS = (
    *("budget", "grid", "patch", "channels", "batch x accumulation", "checkpoints", "stage 1", "U-Net"),
    *("batch x accumulation", "checkpoints", "stage 2", "hours", "asked"),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python -m tests.support.plan_table --only CT"])
    result.add_argument("--out", default=str(PATH), metavar="FILE", help="the document")
    result.add_argument("--only", action="append", choices=NAMES, help="plan only this set and keep the other sections")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Plan set by set, each for every budget, and write the document after each."""
    from memory.predict import Predictor

    out = Path(options.out)
    sections = _sections(out.read_text(encoding="utf-8")) if options.only and out.exists() else {}
    with Predictor(2) as predictor:
        for name in options.only or NAMES:
            sections[name] = _section(name, predictor)
            ordered = [sections[name] for name in NAMES if name in sections]
            out.write_text("\n".join([_INTRODUCTION, *ordered]), encoding="utf-8")
            print(f"{out}: {name} written")
    return 0


def _sections(text: str) -> dict[str, str]:
    parts = text.split("\n## ")[1:]
    return {part.splitlines()[0]: f"## {part.rstrip()}\n" for part in parts}


def _section(name: str, predictor: Predictor) -> str:
    """Make a data set, plan for every budget, and return what comes out as a section."""
    from memory.kernels.gpus import check_gpu
    from memory.planning.fingerprint import take_fingerprint
    from memory.planning.plan import make_plan
    from memory.planning.planner import Planner
    from memory.planning.search import Asker
    from memory.planning.text import found_lines
    from tests.support.plan_sets import SETS, write_set

    with tempfile.TemporaryDirectory() as folder:
        write_set(Path(folder) / "volumes", SETS[name])
        fingerprint = take_fingerprint(DataSettings(source=f"{folder}/volumes"), seed=42)
    counts = [0]
    asker = Asker(predictor, 0, check_gpu(GPU), progress=counts.append)
    lines, reasons = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"], []
    for budget in BUDGETS:
        start, before = time.perf_counter(), counts[-1]
        asker.budget_bytes = budget * GIB
        plan = make_plan(Planner(fingerprint, {}, asker, "planned"), has_alternatives=False)
        lines.append(f"| {budget} GB | {' | '.join(_cells(plan))} | {counts[-1] - before} |")
        reasons += [f"- {budget} GB: {line}." for line in plan.unused]
        print(f"{name}, {budget} GB: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    facts = [line for line in found_lines(fingerprint) if not line.startswith("volumes:")]
    found = ["```text", f"{'volumes:':<13}{fingerprint.number}", *facts, "```"]
    return "\n".join([f"## {name}", "", *found, "", *lines, "", *reasons, *([""] if reasons else [])])


def _cells(plan: Plan) -> Iterator[str]:
    from memory.predict.text import hours_text

    row = plan.recommended
    s, first, second = row.settings, row.settings.autoencoder.training, row.settings.ldm.training
    yield "x".join(map(str, s.data.voxel_size))
    yield "whole" if s.data.patch_size is None else "x".join(map(str, s.data.patch_size))
    yield ", ".join(map(str, s.autoencoder.num_channels))
    yield f"{first.batch_size} x {first.gradient_accumulation_steps}"
    yield "yes" if first.use_gradient_checkpointing else "no"
    yield f"{row.first.prediction.required_bytes / GIB:.1f} GiB, {row.first.share:.0%}"
    yield ", ".join(map(str, s.ldm.unet.num_channels))
    yield f"{second.batch_size} x {second.gradient_accumulation_steps}"
    yield "yes" if second.use_gradient_checkpointing else "no"
    yield f"{row.second.prediction.required_bytes / GIB:.1f} GiB, {row.second.share:.0%}"
    yield f"{hours_text(row.first.hours)} + {hours_text(row.second.hours)}"


if __name__ == "__main__":
    sys.exit(run(main, parse()))
