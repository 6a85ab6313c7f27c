"""The sections of docs/condition_measurements.md."""

from __future__ import annotations

from collections.abc import Sequence

from dev.conditions.tasks import Result, Task

_COLUMNS = ("steps", "guidance", "volumes", "seeds", "own condition", "another's", "none", "own, PSNR dB")


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
            str(r.way.num),
            str(r.way.seeds),
            *(f"{r.errors[told]['l1']:.4f}" for told in ("right", "shuffled", "hidden")),
            f"{r.errors['right']['psnr']:.2f}",
        )
        for r in results
    ]
    best = max(results, key=lambda r: (r.way.seeds, r.lower_than("shuffled")))
    lines = [f"{task.max_steps} updates.", "", *_table(_COLUMNS, rows), ""]
    lines.append(
        f"With {_ways(best)}, L1 is {100 * best.lower_than('shuffled'):.1f} % lower with the right condition than with "
        f"another's, and {100 * best.lower_than('hidden'):.1f} % lower than with none."
    )
    usual = [r for r in results if r.way.steps > 1]
    if usual:
        lower = 1 - best.errors["right"]["l1"] / usual[0].errors["hidden"]["l1"]
        lines.append(
            f"A volume that is drawn with {_ways(usual[0])} and no condition has an L1 of "
            f"{usual[0].errors['hidden']['l1']:.4f}; {_ways(best)} with the right one is {100 * lower:.1f} % below it."
        )
    if "interpolated" in best.errors:
        lines.append(
            f"Trilinear interpolation of the condition has {best.errors['interpolated']['psnr']:.2f} dB, and "
            f"{best.errors['interpolated_kept']['psnr']:.2f} dB if it keeps the means of blocks as samples do."
        )
    return task.title, "\n".join(lines)


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


def _ways(result: Result) -> str:
    way = result.way
    return f"{way.steps} step{'s' if way.steps > 1 else ''} and guidance {way.guidance:g}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]
