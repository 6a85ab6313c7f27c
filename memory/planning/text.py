"""A plan as text for the terminal, and as a commented YAML file as short as a preset."""

from __future__ import annotations

import math
import os
import shlex
import textwrap
from pathlib import Path
from typing import Any

from memory.planning.fingerprint import Fingerprint, Spread
from memory.planning.plan import Plan, Row
from memory.predict.prediction import GIB
from memory.predict.text import hours_text, table
from runtime.files.names import counted, printable
from settings import dump_short
from settings.writing import value_text

AXES = "xyz"
SCHEMA = Path(__file__).resolve().parents[2] / "configs" / "schema.json"
WEAK = "(?)"
WIDTH = 118

Parameters = dict[str, tuple[int, int]]
"""The parameters of both networks by the name of the row."""


def describe_plan(plan: Plan, parameters: Parameters) -> str:
    """Return what was found, the three alternatives, and what the user should know."""
    rows = [["", "grid", "parameters", "stage 1", "stage 2", "hours, at least", "why"]]
    rows += [_cells(row, parameters[row.name]) for row in plan.rows]
    parts = ["\n".join(found_lines(plan.fingerprint)), table(rows), _time_note(plan)]
    parts += ["\n".join(lines) for lines in (_wrapped(plan.unused), _wrapped(plan.notes)) if lines]
    weak = [choice.key for choice in plan.choices if choice.is_weak]
    if weak:
        parts.append("\n".join(_wrapped([f"Inferred from little evidence, worth a look: {', '.join(weak)}."])))
    return "\n\n".join(parts)


def found_lines(found: Fingerprint) -> list[str]:
    """Return what the volumes are like, a line for each fact."""
    spacing = [Spread.of(axis) for axis in zip(*found.spacings, strict=True)]
    lines = [f"volumes:     {found.number} in {printable(found.source)}"]
    lines.append("size:        " + _axes([Spread.of(axis) for axis in zip(*found.sizes, strict=True)], "voxels"))
    if found.has_spacing:
        lines.append("spacing:     " + _axes(spacing, "mm"))
    else:
        lines.append(f"spacing:     {found.num_without_spacing} of {found.number} files store none")
    lines.append(
        f"orientation: {_counts(found.orientations, found.number)}; type: {_counts(found.types, found.number)}"
    )
    background = "" if math.isnan(found.background) else f"; background: {found.background:.0%} of a volume"
    lines.append(
        f"intensity:   1st percentile {_spread(found.low)}, median {_spread(found.median)}, 99th "
        f"{_spread(found.high)}{background}"
    )
    lines.append(
        f"kind:        {_counts(found.kinds, found.number)}, by the values; {counted(found.num_channels, 'channel')}"
    )
    if found.classes:
        shown = [f"{printable(name)} ({count})" for name, count in list(found.classes.items())[:8]]
        lines.append(f"classes:     {', '.join(shown)}{' ...' if len(found.classes) > 8 else ''}")
    if found.num_label_maps:
        lines.append(f"label maps:  {found.num_label_maps} beside the images, recognised as pairs and not trained on")
    return lines


def as_yaml(plan: Plan, parameters: Parameters, command: str, out: Path) -> str:
    """Return the recommended config: what was found, why each value was chosen, then the keys of a preset."""
    row = plan.recommended
    first, second = parameters[row.name]
    budget = plan.budget_bytes / GIB
    head = [
        f"Planned for {budget:g} GiB by: {command}",
        f"Predicted: stage 1 needs {_gib(row.first.prediction.required_bytes)} ({row.first.share:.0%} of the budget), "
        f"stage 2 {_gib(row.second.prediction.required_bytes)} ({row.second.share:.0%}), with the CUDA context; with "
        f"their margins {_gib(row.first.needed_bytes)} and {_gib(row.second.needed_bytes)}.",
        f"Least time on {row.first.gpu.name}: {hours_text(row.first.hours)} + {hours_text(row.second.hours)}; "
        f"{first:,} + {second:,} parameters.",
        f"Start: python train_autoencoder.py --config {shlex.quote(printable(out))}",
        f"Then:  python train_ldm.py --config {shlex.quote(printable(out))}",
        "",
        "What was found",
        *(f"  {line}" for line in found_lines(plan.fingerprint)),
        *(f"  {line}" for line in (*plan.notes, *plan.unused)),
        "",
        f"Why each value was chosen; {WEAK} marks what was inferred from little, so look at it again",
    ]
    for choice in plan.choices:
        mark = f" {WEAK}" if choice.is_weak else ""
        head.append(f"  {choice.key}: {value_text(choice.value)}{mark}: {choice.reason}")
    lines = [f"# yaml-language-server: $schema={_schema(out)}"]
    for text in head:
        indent = "    " if text.startswith("  ") else "  "
        wrapped = textwrap.wrap(text, WIDTH - 2, subsequent_indent=indent, break_long_words=False, drop_whitespace=True)
        lines += [f"# {line}".rstrip() for line in wrapped or [""]]
    marked = {choice.key for choice in plan.choices if choice.is_weak}

    def comment(dotted: str, field: Any) -> str:
        return f"{WEAK} {field.description}" if dotted in marked else str(field.description)

    return "\n".join([*lines, "", dump_short(row.settings, comment)])


def _cells(row: Row, parameters: tuple[int, int]) -> list[str]:
    settings = row.settings
    grid = "x".join(map(str, settings.data.voxel_size))
    if settings.data.patch_size is not None:
        grid += f", patches {'x'.join(map(str, settings.data.patch_size))}"
    return [
        row.name,
        grid,
        " + ".join(f"{count / 1e6:.1f} M" for count in parameters),
        f"{_gib(row.first.prediction.required_bytes)} ({row.first.share:.0%})",
        f"{_gib(row.second.prediction.required_bytes)} ({row.second.share:.0%})",
        f"{hours_text(row.first.hours)} + {hours_text(row.second.hours)}",
        row.why,
    ]


def _time_note(plan: Plan) -> str:
    verdict = plan.recommended.first
    return "\n".join(
        _wrapped(
            [
                f"Memory: what the run needs with the CUDA context, and its part of {plan.budget_bytes / GIB:g} GiB; "
                f"the recommended config fits with its margin. Hours: a lower bound for all updates on "
                f"{verdict.gpu.name}, from bytes moved and operations; expect about twice that."
            ]
        )
    )


def _wrapped(texts: list[str] | tuple[str, ...]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, break_long_words=False)]


def _schema(out: Path) -> str:
    return printable(os.path.relpath(SCHEMA, out.absolute().parent))


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def _axes(spreads: list[Spread], unit: str) -> str:
    return ", ".join(f"{axis} {_spread(spread)}" for axis, spread in zip(AXES, spreads, strict=True)) + f" {unit}"


def _spread(spread: Spread) -> str:
    low, median, high = (f"{value:.3g}" for value in (spread.low, spread.median, spread.high))
    return median if low == high else f"{median} ({low} to {high})"


def _counts(counts: dict[str, int], number: int) -> str:
    if len(counts) == 1:
        return f"{next(iter(counts))}"
    return ", ".join(f"{name} ({count} of {number})" for name, count in list(counts.items())[:4])
