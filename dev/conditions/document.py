"""The sections of docs/condition_measurements.md."""

from __future__ import annotations

from collections.abc import Sequence

from dev.conditions.tasks import AUTOENCODER_STEPS, Result, Task

_COLUMNS = ("steps", "guidance", "networks", "own condition", "another's", "none", "own, PSNR dB")


def sections_of(document: str) -> dict[str, str]:
    """Return the sections of a document by their titles."""
    parts = document.split("\n## ")[1:]
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


def section_of_task(task: Task, results: Sequence[Result]) -> tuple[str, str]:
    """Return the title and the text of a task."""
    rows = [
        (
            str(r.way.steps),
            f"{r.way.guidance:g}",
            str(len(r.of_networks)),
            *(f"{r.error(told):.4f}" for told in ("right", "shuffled", "hidden")),
            f"{r.error('right', 'psnr'):.2f}",
        )
        for r in results
    ]
    networks = f"{len(task.seeds)} networks" if len(task.seeds) > 1 else "one network"
    trained = f"{task.max_steps} updates on an autoencoder of {AUTOENCODER_STEPS:,}, {networks}"
    lines = [f"{trained}, {results[0].num} held-out volumes.", "", *_table(_COLUMNS, rows)]
    lines += ["", *(f"- {_compared(r)}" for r in results)]
    mean, usual = results[0], results[-1]
    lower = 1 - mean.error("right") / usual.error("hidden")
    lines.append(
        f"- {_way(mean)} with the right condition is {_percent(lower)} below {_way(usual)} with none, which has an L1 "
        f"of {usual.error('hidden'):.4f}."
    )
    if "interpolated" in mean.told:
        lines.append(
            f"- Trilinear interpolation of the condition has {mean.error('interpolated', 'psnr'):.2f} dB, and "
            f"{mean.error('interpolated_kept', 'psnr'):.2f} dB if it keeps the means of blocks as samples do."
        )
    return task.title, "\n".join(lines)


def _compared(result: Result) -> str:
    each = result.each_lower_than("shuffled")
    apart = f" ({', '.join(map(_percent, each))})" if len(each) > 1 else ""
    return (
        f"{_way(result)}: L1 is {_percent(result.lower_than('shuffled'))} lower with the right condition than with "
        f"another's{apart}, and {_percent(result.lower_than('hidden'))} lower than with none."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def section_of_surfaces(found: dict[float, float], max_steps: int) -> tuple[str, str]:
    """Return the title and the text of the sparse grids."""
    rows = [(f"{weight:g}", f"{value:.3f}") for weight, value in found.items()]
    values = list(found.values())
    lines = [
        f"Grids of 32 x 32 x 32 voxels with surfaces in empty space; an autoencoder with 4 numbers for each 64 voxels, "
        f"{max_steps} updates; a voxel is occupied above half of the range.",
        "",
        *_table(("occupied_weight", "IoU of held-out grids"), rows),
        "",
        f"The weight adds {values[-1] - values[0]:.3f} to the IoU.",
    ]
    return "Sparse grids", "\n".join(lines)


def _way(result: Result) -> str:
    way = result.way
    return f"{way.steps} step{'s' if way.steps > 1 else ''} and guidance {way.guidance:g}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]
