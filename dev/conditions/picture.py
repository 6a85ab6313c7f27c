"""The picture of README and docs/conditioning.md: what samples make of conditions of held-out volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dev.conditions.tasks import Task, draw

NUM_CASES = 2
ROLES = ("condition", "sample", "true volume")


def row_of(name: str, task: Task) -> list[Any]:
    """Return one plane of condition, sample and true volume, for some held-out volumes one after the other."""
    planes: list[Any] = []
    for case in draw(name, task, NUM_CASES):
        place = case.condition.shape[2] // 2
        if case.unknown is not None:
            found = case.unknown.nonzero()[:, 2]
            place = int(found.min() + found.max() + 1) // 2
        planes += [volume[:, :, place].T.flipud().numpy() for volume in (case.condition, case.sample, case.target)]
    return planes


def write_picture(rows: dict[str, list[Any]], path: Path) -> None:
    """Write a labelled picture with one row for each title."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    number = NUM_CASES * len(ROLES)
    height, width = next(iter(rows.values()))[0].shape
    size = (2 * number + 0.4, 2 * height / width * len(rows) + 0.4)
    figure, axes = pyplot.subplots(
        *(len(rows), number), figsize=size, facecolor="black", layout="constrained", squeeze=False
    )
    for row, (title, planes) in zip(axes, rows.items(), strict=True):
        for place, plane in zip(row, planes, strict=True):
            place.imshow(plane, cmap="gray", vmin=0, vmax=1, interpolation="bicubic")
            place.set(xticks=[], yticks=[])
        row[0].set_ylabel(title, color="white", fontsize=11)
    for column, place in enumerate(axes[0]):
        place.set_title(ROLES[column % len(ROLES)], color="white", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, facecolor="black")
    pyplot.close(figure)
