"""Predictions and ladders as text for people."""

from __future__ import annotations

from typing import Any

from memory.ladder.walk import Ladder, Step, promise
from memory.predict.prediction import GIB, Prediction


def gib(nbytes: float) -> str:
    """Return bytes as GiB with two decimals."""
    return f"{nbytes / GIB:.2f} GiB"


def table(rows: list[list[str]], right: tuple[int, ...] = ()) -> str:
    """Return rows in aligned columns, the first row being the head; `right` columns are aligned at the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])


def describe(prediction: Prediction) -> str:
    """Return the whole prediction as tables."""
    return "\n\n".join(
        [_totals(prediction), _breakdown(prediction), _largest(prediction), _compute(prediction), _notes(prediction)]
    )


def _totals(p: Prediction) -> str:
    rows = [
        ["peak", "", ""],
        ["allocated by tensors", gib(p.peak_allocated_bytes), f"in: {p.phase}"],
        ["reserved, default allocator", gib(p.peak_reserved_default_bytes), ""],
        ["reserved, expandable segments", gib(p.peak_reserved_expandable_bytes), ""],
        ["CUDA context (assumed)", gib(p.context_bytes), ""],
        ["needed on the device", gib(p.required_bytes), f"margin of this tier ({p.tier}): +{p.margin:.0%}"],
        ["host memory for offload", gib(p.host_bytes), ""],
    ]
    if p.correction != 1.0:
        rows.insert(6, ["corrected by measurement", f"x {p.correction:.2f}", p.correction_source])
    return table(rows, right=(1,))


def _breakdown(p: Prediction) -> str:
    rows = [["alive at the peak", "", ""]]
    for name, nbytes in sorted(p.breakdown.items(), key=lambda item: -item[1]):
        rows.append([name, gib(nbytes), f"{nbytes / max(1, p.peak_allocated_bytes):.0%}"])
        if name == "activations":
            rows += [[f"  {_place(part)}", gib(part["bytes"]), ""] for part in p.activations[:8]]
    return table(rows, right=(1, 2))


def _place(part: dict[str, Any]) -> str:
    return f"{part['module']}, level {part['level']}" if part["level"] is not None else part["module"]


def _largest(p: Prediction) -> str:
    rows = [["largest tensors at the peak", "", "", ""]]
    for entry in p.largest[:8]:
        shape = "x".join(map(str, entry["shape"]))
        made_by = entry["module"] or entry["category"]
        rows.append([made_by, gib(entry["bytes"]), f"{shape} {entry['dtype']}", f"{entry['op']}, {entry['phase']}"])
    return table(rows, right=(1,))


def _compute(p: Prediction) -> str:
    rows = [["compute of one update", "TFLOP"]]
    rows += [[name, f"{p.flops[name] / 1e12:.2f}"] for name in ("forward", "backward", "recompute", "total")]
    rows.append(["of which attention", f"{p.flops['attention'] / 1e12:.2f}"])
    text = table(rows, right=(1,))
    if not p.attention:
        return text
    growth = [["attention by grid", "tokens", "our kernel keeps", "a matrix would be", "TFLOP"]]
    for row in p.attention:
        grid = "x".join(map(str, row["grid"]))
        name = f"level {row['level']}, {grid}" + (", every axis doubled" if row["grid_factor"] == 2 else "")
        kernel, matrix = gib(row["kernel_bytes"]), gib(row["matrix_bytes"])
        growth.append([name, f"{row['tokens']:,}", kernel, matrix, f"{row['flops'] / 1e12:.2f}"])
    return text + "\n\n" + table(growth, right=(1, 2, 3, 4))


def _notes(p: Prediction) -> str:
    return f"Not predicted: {'; '.join(p.not_predicted)}. Computed in {p.seconds:.1f} s without a GPU."


def describe_ladder(ladder: Ladder, measured: dict[str, int] | None = None) -> str:
    """Return the rungs as a table and the rungs to take; `measured` holds reserved bytes by rung."""
    head = ["rung", "promise", "allocated", "needed", "host", "compute", "fits"]
    rows = [head + (["measured"] if measured is not None else [])]
    for step in ladder.steps:
        row = [
            step.rung.name,
            promise(step.rung.same_mathematics),
            gib(step.prediction.peak_allocated_bytes),
            gib(step.prediction.required_bytes),
            gib(step.prediction.host_bytes),
            f"{step.relative_flops:.2f}x",
            _fits(step, ladder.budget_bytes),
        ]
        if measured is not None:
            row.append(gib(measured[step.rung.name]) if step.rung.name in measured else "failed")
        rows.append(row)
    parts = [table(rows, right=(2, 3, 4, 5)), *_without_effect(ladder), _verdict(ladder)]
    return "\n\n".join(parts)


def _without_effect(ladder: Ladder) -> list[str]:
    """Return why rungs with the peak of the rung above are on the ladder; nothing when there are none."""
    lines = [
        f"{step.rung.name}: the same peak as above. It lowers {step.rung.lowers}, which does not count here: "
        f"the peak is in {step.prediction.phase}."
        for step in ladder.without_effect
    ]
    return ["\n".join(lines)] if lines else []


def _fits(step: Step, budget_bytes: int) -> str:
    if not step.fits:
        return "no"
    return "yes" if step.fits_with_margin(budget_bytes) else "yes, without margin"


def _verdict(ladder: Ladder) -> str:
    budget = gib(ladder.budget_bytes)
    if ladder.first is None or ladder.fastest is None or ladder.recommended is None:
        smallest = ladder.smallest
        holder = smallest.prediction.largest[0]
        return (
            f"Nothing on the ladder fits {budget}. The smallest is '{smallest.rung.name}' with "
            f"{gib(smallest.prediction.required_bytes)}; it peaks in {smallest.prediction.phase}, held by "
            f"{holder['module'] or holder['category']} ({gib(holder['bytes'])} in one tensor of "
            f"{'x'.join(map(str, holder['shape']))}). Use a smaller grid or patches (data.patch_size), or a larger GPU."
        )
    lines = [
        f"First that fits {budget}: {ladder.first.rung.name}.",
        f"Fastest that fits: {ladder.fastest.rung.name}.",
        f"Recommended: {ladder.recommended.rung.name}"
        + (", which leaves the margin." if ladder.recommended.fits_with_margin(ladder.budget_bytes) else "."),
    ]
    for key, value in ladder.recommended.rung.all_changes.items():
        lines.append(f"  {key}={as_override(value)}")
    return "\n".join(lines)


def as_override(value: Any) -> str:
    """Return a value as it is written behind `section.key=`."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)
