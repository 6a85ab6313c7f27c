"""The benchmark's results as Markdown tables and plots, with a verdict for each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evaluation.benchmarks.variants import OUR_OBJECTIVE, STOCK, STOCK_CHECKPOINTED, TUTORIAL_OBJECTIVE
from memory.predict.prediction import GIB

CLOSE = 1.03
"""Two times within 3 % are called equal."""
MEMORY_PICTURE, TIME_PICTURE = "benchmark_memory.png", "benchmark_time.png"


def write_document(results: dict[str, Any], folder: Path, pictures: Path | None = None) -> Path:
    """Write benchmarks.md into the folder, its plots beside it or into `pictures`; return the document."""
    pictures = pictures or folder
    pictures.mkdir(parents=True, exist_ok=True)
    if "peaks" in results:
        _plot_peaks(results["peaks"], pictures / MEMORY_PICTURE)
    if "steps" in results:
        _plot_steps(results["steps"], pictures / TIME_PICTURE)
    document = folder / "benchmarks.md"
    place = str(pictures.resolve().relative_to(folder.resolve()))
    document.write_text(document_text(results, "" if place == "." else f"{place}/"), encoding="utf-8")
    return document


def document_text(results: dict[str, Any], pictures: str = "images/") -> str:
    """Return benchmarks.md; `pictures` is the prefix of the plots' paths."""
    machine = results["machine"]
    times = (
        "Times are CPU seconds of fp32 on one thread. They are meaningful only as ratios, because the variants are "
        "interleaved within one process."
    )
    if not results.keys() & {"steps", "encoding", "start"}:
        times = "No times are shown, because these settings have not been timed on a quiet machine."
    lines = [
        "# Benchmarks",
        "",
        "Written by `python scripts/benchmark.py --docs`; do not edit by hand. The figures are in "
        "`docs/benchmarks.json`. Memory is predicted, tensor by tensor, for a GPU; no GPU was used. " + times,
        "",
        "Each name means the same setting in every table. All rows but the 3d_ldm-style loops make the same step and "
        f"optimise the same objective: {OUR_OBJECTIVE}. The tutorial that those loops follow optimises "
        f"{TUTORIAL_OBJECTIVE}. Neither side has a perceptual term.",
        "",
        f"Machine: {machine['processor']}, torch {machine['torch']}, Python {machine['python']}."
        + (" **Quick sizes: a smoke test, not results.**" if results["is_quick"] else ""),
    ]
    for part, describe in (
        ("peaks", _peaks),
        ("steps", _steps),
        ("encoding", _encoding),
        ("start", _start),
    ):
        if part in results:
            lines += ["", *describe(results[part], pictures)]
    return "\n".join(lines) + "\n"


def _peaks(rows: list[dict[str, Any]], pictures: str) -> list[str]:
    grids = list(dict.fromkeys(tuple(row["grid"]) for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    found = {(tuple(row["grid"]), row["variant"]): row for row in rows}
    heads = ["x".join(map(str, grid)) for grid in grids]
    last = grids[min(2, len(grids) - 1)]
    base = found[last, STOCK]["flops"]
    lines = [
        "## Peak memory of one training step, GiB",
        "",
        "Under bf16 autocast, except the first row. Autoencoder [16, 32, 64] with attention at the lowest level, "
        "discriminator, both Adam optimizers, batch 1; tensors only. The 3d_ldm-style loop optimises the tutorial's "
        f"objective. Compute is relative to {STOCK} at {'x'.join(map(str, last))}.",
        "",
        *_head(["", *heads, "compute"], right=len(heads) + 1),
    ]
    for name in names:
        cells = [f"{found[grid, name]['peak_allocated_bytes'] / GIB:.2f}" for grid in grids]
        lines.append(_row([_bold(name), *cells, f"{found[last, name]['flops'] / base:.2f}x"]))
    smallest = {is_ours: _smallest(rows, last, is_ours) for is_ours in (False, True)}
    factor = smallest[False]["peak_allocated_bytes"] / smallest[True]["peak_allocated_bytes"]
    plain = found[last, STOCK]["peak_allocated_bytes"] / smallest[True]["peak_allocated_bytes"]
    lines += [
        "",
        f"At {'x'.join(map(str, last))} our leanest step needs {factor:.1f} times less than the leanest of the others "
        f"({smallest[False]['variant']}) and {plain:.1f} times less than {STOCK}.",
        "",
        f"![Peak memory by grid]({pictures}{MEMORY_PICTURE})",
    ]
    return lines


def _smallest(rows: list[dict[str, Any]], grid: tuple[int, ...], is_ours: bool) -> dict[str, Any]:
    wanted = [row for row in rows if row["is_ours"] == is_ours and tuple(row["grid"]) == grid]
    return min(wanted, key=lambda row: row["peak_allocated_bytes"])


def _steps(rows: list[dict[str, Any]], pictures: str) -> list[str]:
    grid = "x".join(map(str, rows[0]["grid"]))
    ratios = {row["variant"]: row["ratio"] for row in rows}
    lines = [
        "## Time and memory of one training step, relative to stock MONAI with SDPA",
        "",
        f"Whole step in fp32 at {grid}: its time on the CPU, interleaved, medians, and the peak of the same step, "
        "predicted for a GPU. A ratio below 1 is faster than stock.",
        "",
        *_head(["", "peak GiB", "CPU seconds", "ratio", "verdict"], right=3),
    ]
    for row in rows:
        rival = STOCK if row["variant"] == "ours, lean blocks" else STOCK_CHECKPOINTED
        words = _verdict(row["ratio"], ratios[rival], rival)
        verdict = words if row["is_ours"] else ""
        figures = [f"{row['peak_allocated_bytes'] / GIB:.2f}", f"{row['seconds']:.2f}", f"{row['ratio']:.2f}"]
        lines.append(_row([_bold(row["variant"]), *figures, verdict]))
    return [*lines, "", f"![Step time]({pictures}{TIME_PICTURE})"]


def _verdict(ours: float, theirs: float, rival: str) -> str:
    word = "as fast as" if max(ours, theirs) / min(ours, theirs) <= CLOSE else "ahead of" if ours < theirs else "behind"
    return f"{word} {rival}"


def _encoding(rows: list[dict[str, Any]], pictures: str) -> list[str]:
    rates = {row["variant"]: row["volumes_per_second"] for row in rows}
    lines = [
        "## From volume to latent",
        "",
        f"One {'x'.join(map(str, rows[0]['grid']))} volume at a time, fp32, one thread. Stage 2 here encodes each "
        "volume once and then reads the kept mean; the 3d_ldm-style loop encodes at every step.",
        "",
        *_head(["", "volumes per CPU second", "relative"], right=2),
    ]
    lines += [_row([name, f"{rate:.3g}", f"{rate / rates[STOCK]:.3g}x"]) for name, rate in rates.items()]
    return lines


def _start(rows: list[dict[str, Any]], pictures: str) -> list[str]:
    lines = ["## Start-up", "", *_head(["", "CPU seconds"], right=1)]
    return lines + [_row([row["what"], f"{row['seconds']:.2f}"]) for row in rows]


def _plot_peaks(rows: list[dict[str, Any]], path: Path) -> None:
    grids = list(dict.fromkeys(tuple(row["grid"]) for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))
    found = {(tuple(row["grid"]), row["variant"]): row for row in rows}
    figure, axes = _figure(8.5, 4.6)
    labels = ["x".join(map(str, grid)) for grid in grids]
    for name in names:
        values = [found[grid, name]["peak_allocated_bytes"] / GIB for grid in grids]
        is_ours = name.startswith("ours")
        axes.plot(
            labels,
            values,
            marker="o",
            linewidth=2.2 if is_ours else 1.4,
            linestyle="-" if is_ours else "--",
            label=name,
        )
    axes.set_yscale("log")
    axes.set_ylabel("peak, GiB (log)")
    for budget in (8, 24, 80):
        axes.axhline(budget, color="0.75", linewidth=0.8)
        axes.annotate(f"{budget} GiB", (0, budget), fontsize=8, color="0.45", va="bottom")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(path, dpi=120)


def _plot_steps(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = _figure(8.5, 3.2)
    names, ratios = [row["variant"] for row in rows], [row["ratio"] for row in rows]
    axes.barh(names, ratios, color=["#1f6feb" if row["is_ours"] else "0.65" for row in rows])
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("step time relative to stock MONAI with SDPA")
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _head(cells: list[str], right: int) -> list[str]:
    marks = ["---"] + ["---:" if number <= right else "---" for number in range(1, len(cells))]
    return [_row(cells), "|" + "|".join(marks) + "|"]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bold(name: str) -> str:
    return f"**{name}**" if name.startswith("ours") else name
