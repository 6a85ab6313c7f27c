"""The rows of docs/quantised.json, and docs/quantised.md, which is written from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA, PATH = DOCS / "quantised.json", DOCS / "quantised.md"
STATES, BOTTLENECKS = "states", "bottlenecks"
NAMES = {STATES: ("stage", "seed", "states"), BOTTLENECKS: ("bottleneck", "steps", "seed", "codes")}
"""What tells the rows of each part apart."""
FLOAT32, NUDGED, EIGHT_BIT = "float32", "float32, nudged", "8bit"

Row = dict[str, Any]

_STATE_COLUMNS = ("stage", "seed", "float32", "nudged", "8bit", "held out: float32", "nudged", "8bit")
_BOTTLENECK_COLUMNS = (
    *("bottleneck", "codes", "bits", "steps", "CPU s"),
    *("PSNR dB", "SSIM", "codes in use", "perplexity"),
)

_INTRODUCTION = """# What 8-bit states and quantised latents cost

Written by `python -m dev.quantised`; do not edit by hand.

The networks and the recipe of `configs/quickstart.yaml` on
{volumes},
brought to a grid of {grid}; 15 % of them are held out. Everything is computed in float32 on one CPU core.
"""

_STATES = """## `device.optimizer_states: 8bit`

{steps} steps. The loss is the mean over the last 20 of them; the held-out loss of stage 1 is that of voxels and edges,
that of stage 2 the error of the prediction at four noise levels. All runs of stage 2 with one seed have the same
latents. In the nudged runs, one weight was changed by 1e-6 before the first step. They show how far rounding alone
leads: differences of this size say nothing about 8 bits.
"""

_BOTTLENECKS = """## `autoencoder.bottleneck`

Held-out volumes; use and perplexity count the codes of all of them.
"""


def read(path: Path = DATA) -> dict[str, Any]:
    """Return all that was measured; nothing if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def keep(part: str, row: Row, path: Path = DATA) -> None:
    """Write a row, in place of an older one that is told apart by nothing."""
    known = read(path)
    others = [old for old in known.get(part, []) if _identity(part, old) != _identity(part, row)]
    known[part] = sorted([*others, row], key=lambda kept: _identity(part, kept))
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _identity(part: str, row: Row) -> list[str]:
    return [f"{row.get(name, ''):>6}" for name in NAMES[part]]


def document(known: dict[str, Any]) -> str:
    """Return the document."""
    grid = "x".join(map(str, known["grid"]))
    parts = [_INTRODUCTION.format(volumes=known["volumes"], grid=grid)]
    if rows := known.get(STATES):
        head = _STATES.format(steps=rows[0]["steps"])
        parts.append(f"{head}\n{_table(_STATE_COLUMNS, _state_cells(rows))}")
    if rows := known.get(BOTTLENECKS):
        parts.append(f"{_BOTTLENECKS}\n{_table(_BOTTLENECK_COLUMNS, map(_bottleneck_cells, rows))}")
    return "\n".join(parts)


def _state_cells(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    found = {(row["stage"], row["seed"], row["states"]): row for row in rows}
    for stage in (1, 2):
        seeds = sorted({row["seed"] for row in rows if row["stage"] == stage})
        if not seeds:
            continue
        changes: dict[tuple[str, str], list[float]] = {}
        for seed in seeds:
            cells = [str(stage), str(seed)]
            for name in ("loss", "held_out_loss"):
                exact = found[stage, seed, FLOAT32][name]
                cells.append(f"{exact:.5f}")
                for kind in (NUDGED, EIGHT_BIT):
                    other = found.get((stage, seed, kind))
                    cells.append("-" if other is None else _percent(other[name] / exact - 1))
                    if other is not None:
                        changes.setdefault((name, kind), []).append(other[name] / exact - 1)
            yield cells
        means = {key: _percent(sum(values) / len(values)) for key, values in changes.items()}
        cells = [str(stage), "mean"]
        for name in ("loss", "held_out_loss"):
            cells += ["", *(means.get((name, kind), "-") for kind in (NUDGED, EIGHT_BIT))]
        yield cells


def _bottleneck_cells(row: Row) -> Sequence[str]:
    codes = ("-", "-") if "codes" not in row else (f"{row['codes']:,}", f"{row['bits']:.1f}")
    use = ("-", "-") if "codes" not in row else (f"{100 * row['codebook_use']:.1f} %", f"{row['perplexity']:,.0f}")
    size = (f"{row['steps']:,}", f"{row['cpu_seconds']:.0f}")
    return (f"`{row['bottleneck']}`", *codes, *size, f"{row['psnr']:.2f}", f"{row['ssim']:.3f}", *use)


def _percent(change: float) -> str:
    return f"{100 * change:+.1f} %"


def _table(columns: Sequence[str], rows: Any) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows), ""])
