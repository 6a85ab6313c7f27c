"""The benchmark's results as Markdown tables with a verdict for each row."""

from __future__ import annotations

from typing import Any

from evaluation.benchmarks.variants import OUR_OBJECTIVE, STOCK, STOCK_CHECKPOINTED, TUTORIAL_OBJECTIVE
from memory.predict.prediction import GIB

CLOSE = 1.03
"""Two times within 3 % are called equal."""


def document_text(results: dict[str, Any]) -> str:
    """Return benchmarks.md."""
    machine = results["machine"]
    times = (
        "Times are CPU seconds of fp32 on one thread. They are meaningful only as ratios, because the variants are "
        "interleaved within one process."
        if "steps" in results
        else "No times are shown, because these settings have not been timed on a quiet machine."
    )
    lines = [
        "# Benchmarks",
        "",
        "Written by `python scripts/benchmark.py`; `docs/benchmarks.json` has the figures that its `--json` writes. "
        "Memory is predicted, tensor by tensor, for a GPU; no GPU was used. " + times,
        "",
        "Each name means the same setting in every table. All rows but the 3d_ldm-style loops make the same step and "
        f"optimise the same objective: {OUR_OBJECTIVE}. The tutorial that those loops follow optimises "
        f"{TUTORIAL_OBJECTIVE}. Neither side has a perceptual term.",
        "",
        f"Machine: {machine['processor']}, torch {machine['torch']}, Python {machine['python']}.",
    ]
    for part, describe in (("peaks", _peaks), ("steps", _steps)):
        if part in results:
            lines += ["", *describe(results[part])]
    return "\n".join(lines) + "\n"


def _peaks(rows: list[dict[str, Any]]) -> list[str]:
    by_variant = _by_variant(rows)
    heads = list(by_variant[STOCK])
    shown = heads[min(2, len(heads) - 1)]
    lines = [
        "## Peak memory of one training step, GiB",
        "",
        "Under bf16 autocast, except the first row. Autoencoder [16, 32, 64] with attention at the lowest level, "
        "discriminator, both Adam optimizers, batch 1; tensors only. The 3d_ldm-style loop optimises the tutorial's "
        f"objective. Compute is relative to {STOCK} at {shown}.",
        "",
        _row(["", *heads, "compute"]),
        "|---|" + "---:|" * (len(heads) + 1),
    ]
    for name, by_grid in by_variant.items():
        cells = [f"{row['peak_allocated_bytes'] / GIB:.2f}" for row in by_grid.values()]
        compute = by_grid[shown]["flops"] / by_variant[STOCK][shown]["flops"]
        lines.append(_row([_bold(name), *cells, f"{compute:.2f}x"]))
    peaks = {name: by_grid[shown]["peak_allocated_bytes"] for name, by_grid in by_variant.items()}
    ours = min(peak for name, peak in peaks.items() if by_variant[name][shown]["is_ours"])
    rival = min((name for name in peaks if not by_variant[name][shown]["is_ours"]), key=lambda name: peaks[name])
    return [
        *lines,
        "",
        f"At {shown} our leanest step needs {peaks[rival] / ours:.1f} times less than the leanest of the others "
        f"({rival}) and {peaks[STOCK] / ours:.1f} times less than {STOCK}.",
    ]


def _steps(rows: list[dict[str, Any]]) -> list[str]:
    ratios = {row["variant"]: row["ratio"] for row in rows}
    lines = [
        "## Time and memory of one training step, relative to stock MONAI with SDPA",
        "",
        f"Whole step in fp32 at {_grid(rows[0])}: its time on the CPU, interleaved, medians, and the peak of the same "
        "step, predicted for a GPU. A ratio below 1 is faster than stock.",
        "",
        _row(["", "peak GiB", "CPU seconds", "ratio", "verdict"]),
        "|---|---:|---:|---:|---|",
    ]
    for row in rows:
        rival = STOCK if row["variant"] == "ours, lean blocks" else STOCK_CHECKPOINTED
        verdict = _verdict(row["ratio"] / ratios[rival], rival) if row["is_ours"] else ""
        figures = [f"{row['peak_allocated_bytes'] / GIB:.2f}", f"{row['seconds']:.2f}", f"{row['ratio']:.2f}"]
        lines.append(_row([_bold(row["variant"]), *figures, verdict]))
    return lines


def _verdict(ratio: float, rival: str) -> str:
    word = "as fast as" if 1 / CLOSE <= ratio <= CLOSE else "ahead of" if ratio < 1 else "behind"
    return f"{word} {rival}"


def _by_variant(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows by variant, then by grid in words."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        table.setdefault(row["variant"], {})[_grid(row)] = row
    return table


def _grid(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["grid"]))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bold(name: str) -> str:
    return f"**{name}**" if name.startswith("ours") else name
