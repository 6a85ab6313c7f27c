"""A plan as text for the terminal, and as a commented YAML file as short as a preset."""

from __future__ import annotations

import math
import os
import shlex
import textwrap
from pathlib import Path
from typing import Any

import torch

from memory.kernels.timing import hours_range_text
from memory.planning.fingerprint import Fingerprint, Spread
from memory.planning.planner import Plan
from memory.planning.search import Assessment
from memory.predict.prediction import GIB
from models import build_autoencoder, build_unet
from runtime.files import counted, printable
from settings import Settings, dump_short
from settings.yaml_reader import value_text

AXES = "xyz"
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
    marked = {choice.key for choice in plan.choices if choice.is_weak}

    def comment(dotted: str, field: Any) -> str:
        return f"{WEAK} {field.description}" if dotted in marked else str(field.description)

    return "\n".join([f"# yaml-language-server: $schema={schema}", *lines, "", dump_short(plan.settings, comment)])


def _hours(stage: Assessment) -> str:
    limit = stage.max_hours
    return f"{limit:g} h" if limit is not None else hours_range_text(stage.hours, stage.prediction.is_time_measured)


def _paragraphs(plan: Plan) -> list[str]:
    first, second = plan.assessments["autoencoder"], plan.assessments["ldm"]
    needs = [
        f"stage {number} {_gib(stage.prediction.required_bytes)} ({stage.share:.0%} of the budget), with its margin "
        f"{_gib(stage.prediction.required_with_margin)}"
        for number, stage in enumerate((first, second), start=1)
    ]
    in_autoencoder, in_unet = _num_parameters(plan.settings)
    texts = [
        f"Memory, with the CUDA context: {'; '.join(needs)}.",
        f"Time on {first.gpu.name}: {_hours(first)} + {_hours(second)}, from operations, bytes moved and kernels.",
        f"Parameters: {in_autoencoder:,} + {in_unet:,}.",
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


def _num_parameters(settings: Settings) -> tuple[int, int]:
    """Return the parameters of the autoencoder and of the U-Net; builds both without memory."""
    with torch.device("meta"):
        networks = (
            build_autoencoder(settings.autoencoder),
            build_unet(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape),
        )
    first, second = (sum(parameter.numel() for parameter in network.parameters()) for network in networks)
    return first, second


def found_lines(found: Fingerprint) -> list[str]:
    """Return what the volumes are like, a line for each fact."""
    lines = [f"volumes:     {found.number} in {printable(found.source)}"]
    lines.append(f"size:        {_axes(found.sizes, 'voxels')}")
    without = f"{found.num_without_spacing} of {found.number} files store none"
    lines.append(f"spacing:     {_axes(found.spacings, 'mm') if found.has_spacing else without}")
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
    if found.num_left_out:
        lines.append(f"left out:    {counted(found.num_left_out, 'file')}; check_data.py says which and why")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    indent = "    " if text.startswith("  ") else "  "
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False) or [""]


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def _axes(rows: tuple[tuple[float, ...], ...], unit: str) -> str:
    spreads = [_spread(Spread.of(axis)) for axis in zip(*rows, strict=True)]
    return ", ".join(f"{axis} {spread}" for axis, spread in zip(AXES, spreads, strict=True)) + f" {unit}"


def _spread(spread: Spread) -> str:
    low, median, high = (f"{value:.3g}" for value in (spread.low, spread.median, spread.high))
    return median if low == high else f"{median} ({low} to {high})"


def _counts(counts: dict[str, int], number: int) -> str:
    if len(counts) == 1:
        return f"{next(iter(counts))}"
    return ", ".join(f"{name} ({count} of {number})" for name, count in list(counts.items())[:4])
