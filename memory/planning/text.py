"""A plan as text for the terminal, and as a YAML file as short as a preset. Never imports torch."""

from __future__ import annotations

import math
import os
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memory.kernels.timing import hours_range_text
from memory.planning.fingerprint import Fingerprint, Spread
from memory.planning.planner import Plan
from memory.predict.prediction import GIB
from runtime.files import counted, printable
from settings import dump_short
from settings.section import value_text

SCHEMA = Path(__file__).resolve().parents[2] / "configs" / "schema.json"
WEAK = "(?)"
WIDTH = 118


def describe_plan(plan: Plan) -> str:
    """Return what the plan needs, what was found in the data, and why each value was chosen."""
    return "\n".join(line for text in _paragraphs(plan) for line in _wrapped(text, WIDTH))


def as_yaml(plan: Plan, command: str, out: Path) -> str:
    """Return the config with the keys of a preset, below the text of `describe_plan` and the commands to run."""
    schema = printable(os.path.relpath(SCHEMA, out.absolute().parent))
    head = [
        f"Planned for {plan.budget_bytes / GIB:g} GiB by: {command}",
        f"Start: python train_autoencoder.py --config {shlex.quote(printable(out))}",
        f"Then:  python train_ldm.py --config {shlex.quote(printable(out))}",
        *_paragraphs(plan),
    ]
    lines = [f"# {line}".rstrip() for text in head for line in _wrapped(text, WIDTH - 2)]
    weak = {choice.key for choice in plan.choices if choice.is_weak}

    def comment(dotted: str, field: Any) -> str:
        return f"{WEAK} {field.description}" if dotted in weak else str(field.description)

    return "\n".join([f"# yaml-language-server: $schema={schema}", *lines, "", dump_short(plan.settings, comment)])


def _paragraphs(plan: Plan) -> list[str]:
    needs, times = [], []
    for number, (stage, p) in enumerate(plan.predictions.items(), start=1):
        margin = f"with its margin {p.required_with_margin / GIB:.1f} GiB"
        share = p.required_bytes / plan.budget_bytes
        needs.append(f"stage {number} {p.required_bytes / GIB:.1f} GiB ({share:.0%} of the budget), {margin}")
        limit = plan.settings.training_of(stage).max_hours
        predicted = hours_range_text(p.hours(plan.gpu), p.is_time_measured)
        times.append(predicted if limit is None else f"{limit:g} h")
    texts = [
        f"Memory, with the CUDA context: {'; '.join(needs)}.",
        f"Time on {plan.gpu.name}: {' + '.join(times)}, from operations, bytes moved and kernels.",
        *plan.notes,
        "",
        "What was found",
        *(f"  {line}" for line in found_lines(plan.fingerprint)),
        "",
        f"Why each value was chosen; {WEAK} marks what was inferred from little, so look at it again",
    ]
    for choice in plan.choices:
        mark = f" {WEAK}" if choice.is_weak else ""
        texts.append(f"  {choice.key}: {value_text(choice.value)}{mark}: {choice.reason}")
    return texts


def found_lines(found: Fingerprint) -> list[str]:
    """Return what the volumes are like, a line for each fact."""
    spacing = f"{found.num_without_spacing} of {found.number} files store none"
    if found.has_spacing:
        spacing = f"{_axes(found.spacings)} mm"
    low, median, high = map(_spread, (found.low, found.median, found.high))
    background = "" if math.isnan(found.background) else f"; background: {found.background:.0%} of a volume"
    kinds = ", ".join(f"{kind} ({count} of {found.number})" for kind, count in found.kinds.items())
    lines = [
        f"volumes:   {found.number} in {printable(found.source)}",
        f"size:      {_axes(found.sizes)} voxels",
        f"spacing:   {spacing}",
        f"intensity: 1st percentile {low}, median {median}, 99th {high}{background}",
        f"kind:      {kinds}, by the values; {counted(found.num_channels, 'channel')}",
    ]
    if found.classes:
        shown = [f"{printable(name)} ({count})" for name, count in list(found.classes.items())[:8]]
        lines.append(f"classes:   {', '.join(shown)}{' ...' if len(found.classes) > 8 else ''}")
    if found.num_left_out:
        lines.append(f"left out:  {counted(found.num_left_out, 'file')}; check_data.py says which and why")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    indent = "    " if text.startswith("  ") else "  "
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False) or [""]


def _axes(rows: Sequence[Sequence[float]]) -> str:
    axes = zip("xyz", zip(*rows, strict=True), strict=True)
    return ", ".join(f"{axis} {_spread(Spread.of(values))}" for axis, values in axes)


def _spread(spread: Spread) -> str:
    low, median, high = (f"{value:.3g}" for value in spread)
    return median if low == high else f"{median} ({low} to {high})"
