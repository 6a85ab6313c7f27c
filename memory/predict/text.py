"""Predictions as text tables for the terminal."""

from __future__ import annotations

from typing import Any

from memory.predict.prediction import GIB, Prediction


def gib(nbytes: float) -> str:
    """Return bytes as GiB with two decimals."""
    return f"{nbytes / GIB:.2f} GiB"


def table(rows: list[list[str]], right: tuple[int, ...] = ()) -> str:
    """Return rows as aligned columns, the first row as the header; `right` lists the right-aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])


def describe_prediction(prediction: Prediction) -> str:
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
