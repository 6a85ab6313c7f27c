"""The sections of docs/prediction.md that show what was measured on a machine without a GPU."""

from __future__ import annotations

from typing import Any

from scripts.dev.measured.record import read

_ALLOCATOR = """## Torch's own allocators

Two updates of each preset and of variants through torch's CUDA build, with a stand-in for the GPU whose kernels do
nothing: dispatcher, autocast, autograd and both caching allocators are torch's own. Convolutions have no workspaces
there, so they are left out of the prediction too. GiB; the last columns are pinned memory of the host, for offload.

| step | allocated | predicted | ratio | reserved | predicted | ratio | pinned | predicted |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""

_RESIDENT = """## Resident memory of CPU steps

Growth of the resident memory of a process during one full step in fp32, MiB, one thread, {grid} voxels, with blocks
that are returned to the system when they are released.

| step | measured | predicted | ratio |
|---|---:|---:|---:|
"""


def measured_sections() -> list[str]:
    """Return the sections for which something has been measured."""
    sections = []
    if rows := read("allocator"):
        sections.append(_ALLOCATOR + "".join(_allocator_row(name, row) for name, row in rows.items()))
    if rows := read("resident"):
        grid = "x".join(map(str, next(iter(rows.values()))["grid"]))
        sections.append(_RESIDENT.format(grid=grid) + "".join(_resident_row(name, row) for name, row in rows.items()))
    return sections


def _allocator_row(name: str, row: dict[str, Any]) -> str:
    cells = [name]
    for part in ("allocated", "reserved"):
        measured, predicted = row[part]
        cells += [f"{measured / 2**30:.3f}", f"{predicted / 2**30:.3f}", f"{predicted / measured:.3f}"]
    cells += [f"{nbytes / 2**30:.3f}" if nbytes else "" for nbytes in row["host"]]
    return f"| {' | '.join(cells)} |\n"


def _resident_row(name: str, row: dict[str, Any]) -> str:
    measured, predicted = row["resident"]
    return f"| {name} | {measured / 2**20:.0f} | {predicted / 2**20:.0f} | {predicted / measured:.3f} |\n"
