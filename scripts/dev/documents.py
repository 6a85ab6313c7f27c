"""Write every generated document again: schema, configuration reference, memory guide, preset headers, READMEs."""

from __future__ import annotations

import argparse
import io
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
    text = "only schema and reference, which need no prediction"
    result.add_argument("--settings", action="store_true", help=text)
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Write every document whose text changes."""
    texts = of_settings()
    if not options.settings:
        from scripts.dev.predicted_tables import of_predictions

        texts |= of_predictions(ROOT) | {ROOT / "docs" / "images" / "memory.svg": memory_figure()}
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


def of_settings() -> dict[Path, str]:
    """Return the schema, with which editors complete and check keys, and the reference."""
    return {
        ROOT / "configs" / "schema.json": json.dumps(Settings.model_json_schema(), indent=2) + "\n",
        ROOT / "docs" / "configuration.md": configuration_reference(),
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
    "stock MONAI, default attention": ("stock MONAI", "#8a94a0", ":"),
    "stock MONAI, SDPA": ("stock MONAI, fused attention", "#5c6773", "--"),
    "stock MONAI, SDPA, use_checkpoint": ("the same with its checkpointing", "#39434e", "-"),
    "ours, lean blocks": ("ours", "#7fb2ff", "-"),
    "ours, checkpointing": ("ours, checkpointing", "#1f6feb", "-"),
    "ours, nested, slabs of 8": ("ours, nested checkpointing, slabs", "#0b3d91", "-"),
}
GPUS = {8: "8 GB: RTX 4060", 12: "12 GB: RTX 3060", 24: "24 GB: RTX 4090", 80: "80 GB: A100, H100"}
HIGHEST = 300


def memory_figure() -> str:
    """Return README's figure as SVG: the peak of one step over the size of the grid; both axes are logarithmic."""
    from matplotlib import pyplot

    rows = json.loads(BENCHMARKS.read_text(encoding="utf-8"))["peaks"]
    grids = sorted({tuple(row["grid"]) for row in rows}, key=math.prod)
    voxels = [math.prod(grid) for grid in grids]
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "memory"})
    figure, axes = pyplot.subplots(figsize=(9, 4.7), layout="constrained")
    for gib, name in GPUS.items():
        axes.axhline(gib, color="#d9730d", linewidth=1, linestyle=(0, (3, 3)))
        axes.annotate(name, (voxels[0], gib), (-8, 3), textcoords="offset points", color="#b35c00", fontsize=8.5)
    for variant, (name, colour, style) in LINES.items():
        peaks = {tuple(row["grid"]): row["peak_allocated_bytes"] / 2**30 for row in rows if row["variant"] == variant}
        if (last := peaks[grids[-1]]) > HIGHEST:
            name += f" ({last:,.0f} GiB at {'x'.join(map(str, grids[-1]))})"
        axes.loglog(voxels, [peaks[grid] for grid in grids], style, color=colour, marker="o", markersize=5)
        axes.annotate(
            name, (voxels[-1], min(last, HIGHEST)), (24, -3), textcoords="offset points", annotation_clip=False,
            color=colour, fontsize=9.5,
        )  # fmt: skip
    axes.set_xticks(voxels, ["x".join(map(str, grid)) for grid in grids])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="grid of one volume", ylabel="peak of one training step, GiB", ylim=(None, HIGHEST))
    axes.grid(axis="y", color="#e3e8ee")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


if __name__ == "__main__":
    sys.exit(run(main, parse()))
