"""Write docs/plans.md: the plans for five data sets and four budgets, with what each uses of its budget."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import parser, run
from settings import DataSettings

if TYPE_CHECKING:
    from planning.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "plans.md"
BUDGETS = (6, 12, 24, 48)
GPU = "RTX 4090"
GIB = 1 << 30

_INTRODUCTION = f"""# Plans

Written by `python dev/plan_table.py`; do not edit by hand.

What `scripts/plan.py` recommends for five generated data sets and four budgets. Every plan is validated and fits with
its margin. Shares are what a stage needs of the budget without its margin, which the predictor adds on top. A stage
that needs less than 75 % has its reason below the table. Hours are the least for all updates on an {GPU}. "Asked"
counts the predictions that a plan needed besides those that it shares with smaller budgets.
"""
_COLUMNS = (
    *("budget", "grid", "patch", "channels", "batch x accumulation", "checkpoints", "stage 1", "U-Net"),
    *("batch x accumulation", "checkpoints", "stage 2", "hours", "asked"),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python dev/plan_table.py"])
    result.add_argument("--out", default=str(PATH), metavar="FILE", help="the document")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Make the data sets, plan for each budget, and write the document."""
    Path(options.out).write_text(document(), encoding="utf-8")
    print(options.out)
    return 0


def document() -> str:
    """Return the document."""
    from dev.plan_sets import SETS, write_set
    from memory.kernels.gpus import check_gpu
    from memory.predict import Predictor
    from planning.fingerprint import take_fingerprint
    from planning.plan import make_plan
    from planning.planner import Planner
    from planning.search import Asker
    from planning.text import found_lines

    parts = [_INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder, Predictor(2) as predictor:
        for name, volumes in SETS.items():
            place = Path(folder) / name.replace(" ", "_")
            write_set(place, volumes)
            fingerprint = take_fingerprint(DataSettings(source=str(place)), seed=42)
            counts = [0]
            asker = Asker(predictor, 0, check_gpu(GPU), progress=counts.append)
            found = [line for line in found_lines(fingerprint) if not line.startswith("volumes:")]
            lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
            reasons = []
            for budget in BUDGETS:
                start = time.perf_counter()
                asker.budget_bytes = budget * GIB
                before = counts[-1]
                plan = make_plan(Planner(fingerprint, {}, asker, "planned"), has_alternatives=False)
                lines.append(f"| {budget} GB | {' | '.join(_cells(plan))} | {counts[-1] - before} |")
                reasons += [f"- {budget} GB: {line}." for line in plan.unused]
                print(f"{name}, {budget} GB: {time.perf_counter() - start:.0f} s", file=sys.stderr)
            facts = "\n".join(["```text", f"{'volumes:':<13}{fingerprint.number}", *found, "```"])
            parts += [
                f"## {name}\n",
                facts + "\n",
                "\n".join(lines) + "\n",
                "\n".join(reasons) + "\n" if reasons else "",
            ]
    return "\n".join(part for part in parts if part)


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
