"""Write every generated document again: schema, configuration reference, memory guide, preset headers, READMEs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from runtime.cli import parser, run
from settings.load import default_text, known_keys
from settings.root import Settings
from settings.section import is_section

ROOT = Path(__file__).resolve().parents[2]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python -m scripts.dev.documents", "python -m scripts.dev.documents --settings"])
    text = "only schema, reference and figure, which need no prediction"
    result.add_argument("--settings", action="store_true", help=text)
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Write every document whose text changes."""
    texts = of_settings()
    if not options.settings:
        from scripts.dev.predicted_tables import of_predictions

        texts |= of_predictions(ROOT)
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


def of_settings() -> dict[Path, str]:
    """Return the schema, with which editors complete and check keys, the reference, and README's figure."""
    return {
        ROOT / "configs" / "schema.json": json.dumps(Settings.model_json_schema(), indent=2) + "\n",
        ROOT / "docs" / "configuration.md": configuration_reference(),
        ROOT / "docs" / "images" / "memory.svg": memory_figure(),
    }


_HEAD = """# Configuration reference

Generated from the settings by `python -m scripts.dev.documents`; do not edit by hand.

Every key has a default, so a config may contain only what differs. Set keys in YAML, or as overrides at
the end of a command: `python train_autoencoder.py --config configs/high_res.yaml data.num_workers=4`.

- **same mathematics**: affects memory and speed but no gradient; may change when a run resumes.
- **different mathematics**: affects what is learned; a run refuses to resume after such a change.
- **free**: affects neither, for example how long to train and what to log.

## Top level
"""
_TABLE_HEAD = ["", "| key | values | default | promise | what it does |", "|---|---|---|---|---|"]


def configuration_reference() -> str:
    """Return docs/configuration.md: every key with its default, its promise and its one-line description."""
    lines = [_HEAD.rstrip(), *_TABLE_HEAD, *(_row(name, field) for name, field in Settings.model_fields.items())]
    for dotted, field in known_keys():
        if is_section(field):
            lines += ["", f"## `{dotted}`", "", str(field.description), *_TABLE_HEAD]
            lines += [_row(f"{dotted}.{name}", inner) for name, inner in field.annotation.model_fields.items()]
    return "\n".join(lines) + "\n"


def _row(dotted: str, field: Any) -> str:
    name = dotted.rsplit(".", 1)[-1]
    if is_section(field):
        return f"| `{name}` | section | | | {field.description} See `{dotted}` below. |"
    promise = field.json_schema_extra["promise"]
    return f"| `{name}` | {_values(field.annotation)} | `{default_text(field)}` | {promise} | {field.description} |"


def _values(annotation: Any) -> str:
    """Return the allowed values of a key in words."""
    names = {bool: "true, false", int: "whole number", float: "number", str: "text", type(None): "null"}
    if annotation in names:
        return names[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        element = _values(arguments[0])
        return f"list of {element}s" if element.endswith("number") else f"list of {element}"
    if hasattr(annotation, "__metadata__"):
        return _values(arguments[0])
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, arguments))
    return " or ".join(_values(argument) for argument in arguments)


BENCHMARKS = ROOT / "docs" / "benchmarks.json"
LINES = {
    "stock MONAI, default attention": ("stock MONAI", "#8a94a0", "2 4"),
    "stock MONAI, SDPA": ("stock MONAI, fused attention", "#5c6773", "7 4"),
    "stock MONAI, SDPA, use_checkpoint": ("the same with its checkpointing", "#39434e", ""),
    "ours, lean blocks": ("ours", "#7fb2ff", ""),
    "ours, checkpointing": ("ours, checkpointing", "#1f6feb", ""),
    "ours, nested, slabs of 8": ("ours, nested checkpointing, slabs", "#0b3d91", ""),
}
GPUS = {8: "8 GB: RTX 4060", 12: "12 GB: RTX 3060", 24: "24 GB: RTX 4090", 80: "80 GB: A100, H100"}
LOWEST, HIGHEST = 0.08, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64, 560, 24, 400
WIDTH, HEIGHT = 860, 452


def memory_figure() -> str:
    """Return README's figure as SVG: the peak of one step over the size of the grid; both axes are logarithmic."""
    rows = json.loads(BENCHMARKS.read_text(encoding="utf-8"))["peaks"]
    grids = sorted({tuple(row["grid"]) for row in rows}, key=math.prod)
    smallest, largest = math.log(math.prod(grids[0])), math.log(math.prod(grids[-1]))

    def across(grid: tuple[int, ...]) -> float:
        return LEFT + 16 + (math.log(math.prod(grid)) - smallest) / (largest - smallest) * (RIGHT - LEFT - 32)

    def up(gib: float) -> float:
        return BOTTOM - math.log(gib / LOWEST) / math.log(HIGHEST / LOWEST) * (BOTTOM - TOP)

    def line(y: float, style: str) -> str:
        return f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {style}/>'

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for tick in (0.1, 1, 10, 100):
        parts.append(line(up(tick), 'stroke="#e4e8ec"'))
        parts.append(_text(LEFT - 8, up(tick) + 4, f"{tick:g}", "end"))
    for gib, name in GPUS.items():
        parts.append(line(up(gib), 'stroke="#d9730d" stroke-dasharray="3 3"'))
        parts.append(_text(LEFT + 6, up(gib) - 4, name, "start", "#b35c00"))
    for grid in grids:
        parts.append(_text(across(grid), BOTTOM + 18, "x".join(map(str, grid)), "middle"))
    labels = []
    for variant, (name, colour, dash) in LINES.items():
        peaks = {tuple(row["grid"]): row["peak_allocated_bytes"] / 2**30 for row in rows if row["variant"] == variant}
        shown = [(across(grid), up(peaks[grid])) for grid in grids if peaks[grid] <= HIGHEST]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        style = f'fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{points}" {style}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in shown]
        label = shown[-1][1], name
        if len(shown) < len(grids):
            label = up(HIGHEST), f"{name} ({peaks[grids[-1]]:,.0f} GiB at {'x'.join(map(str, grids[-1]))})"
        labels.append((*label, colour))
    lowest_label = 0.0
    for y, name, colour in sorted(labels):
        lowest_label = max(y + 4, lowest_label + 17)
        parts.append(_text(RIGHT + 8, lowest_label, name, "start", colour))
    parts.append(_text((LEFT + RIGHT) / 2, HEIGHT - 10, "grid of one volume", "middle"))
    middle = (TOP + BOTTOM) / 2
    parts.append(
        f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, "peak of one training step, GiB", "middle")}</g>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
    font = 'font-family="system-ui, Segoe UI, Roboto, Noto Sans, sans-serif" font-size="12">'
    return "\n".join([head + font, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#39434e") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    sys.exit(run(main, parse()))
