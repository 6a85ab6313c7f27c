"""The figure of README: peak memory of one training step over the size of the grid, from docs/benchmarks.json."""

from __future__ import annotations

import json
import math
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.json"
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
    """Return the SVG; both axes are logarithmic."""
    rows = json.loads(BENCHMARKS.read_text(encoding="utf-8"))["peaks"]
    grids = sorted({tuple(row["grid"]) for row in rows}, key=math.prod)
    smallest, largest = math.log(math.prod(grids[0])), math.log(math.prod(grids[-1]))

    def across(grid: tuple[int, ...]) -> float:
        return LEFT + 16 + (math.log(math.prod(grid)) - smallest) / (largest - smallest) * (RIGHT - LEFT - 32)

    def up(gib: float) -> float:
        return BOTTOM - math.log(gib / LOWEST) / math.log(HIGHEST / LOWEST) * (BOTTOM - TOP)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for tick in (0.1, 1, 10, 100):
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}" stroke="#e4e8ec"/>')
        parts.append(_text(LEFT - 8, up(tick) + 4, f"{tick:g}", "end"))
    for gib, name in GPUS.items():
        y = up(gib)
        parts.append(
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d9730d" stroke-dasharray="3 3"/>'
        )
        parts.append(_text(LEFT + 6, y - 4, name, "start", "#b35c00"))
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
        beyond = (
            "" if len(shown) == len(grids) else f" ({peaks[grids[-1]]:,.0f} GiB at {'x'.join(map(str, grids[-1]))})"
        )
        labels.append((shown[-1][1] if not beyond else up(HIGHEST), name + beyond, colour))
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
