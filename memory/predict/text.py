"""Predictions as text tables for the terminal."""

from __future__ import annotations

import math

from memory.kernels.gpus import Gpu, dominant_part, hours_range_text, seconds_range_text, time_range
from memory.predict.prediction import (
    ENCODED_VOLUME,
    GIB,
    NCCL_BYTES,
    PREVIEWS,
    VALIDATED_VOLUME,
    Prediction,
)
from runtime.files import counted
from training.recording import duration_text

CPU_TIME = "Time on a CPU: not known before training has measured its first steps."


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


def describe_prediction(prediction: Prediction, gpu: Gpu, num_gpus: int = 1) -> str:
    """Return the whole prediction as tables; times are for `num_gpus` of `gpu`."""
    parts = [
        _totals(prediction, num_gpus),
        _breakdown(prediction),
        _largest(prediction),
        _compute(prediction),
        describe_time(prediction, gpu, num_gpus),
        *(f"Warning: {text}." for text in prediction.warnings),
        f"Not predicted: {'; '.join(prediction.not_predicted)}. Computed in {prediction.seconds:.1f} s without a GPU.",
    ]
    return "\n\n".join(parts)


def describe_time(p: Prediction, gpu: Gpu, num_gpus: int = 1, max_hours: float | None = None) -> str:
    """Return from when to when an update and the whole run take, and what takes most of an update.

    A run with `max_hours` has no last update; how many it has is said instead. Times on a CPU are not known.
    """
    if not p.is_for_gpu:
        return CPU_TIME
    seconds, is_measured = p.seconds_per_step(gpu), p.is_time_measured
    cards = gpu.name if num_gpus == 1 else f"{num_gpus} x {gpu.name}"
    hours = hours_range_text(p.hours(gpu), is_measured)
    whole = f"{hours} for the whole run of {counted(p.max_steps, 'update')}{_beside_text(p, gpu)}"
    if max_hours is not None:
        fewest, most = (
            math.ceil(3600 * max_hours / max(1e-9, each)) for each in time_range(seconds, is_measured)[::-1]
        )
        whole = f"{fewest:,} to {most:,} updates in the {duration_text(3600 * max_hours)} that the run trains"
    text = (
        f"Time on {cards}: {seconds_range_text(seconds, is_measured)} an update, {whole} "
        f"({p.traffic_bytes / GIB:,.1f} GiB moved by {p.kernels:,} kernels; docs/prediction.md has the shares of the "
        f"card's figures that are taken; {gpu.source})."
    )
    if num_gpus > 1:
        text += f" Each update sees {num_gpus} times as many volumes; exchanging gradients is not in the time."
    if p.is_time_measured:
        text += f" Corrected by measured steps: {p.time_correction:.2f} times."
    return text + dominant_text(p, gpu)


def _beside_text(p: Prediction, gpu: Gpu) -> str:
    """Return what is in the time of a run besides its updates."""
    times = {n: hours_range_text(seconds / 3600, p.is_time_measured) for n, seconds in p.seconds_beside(gpu).items()}
    if not times:
        return ""
    num_train, num_held_out = p.num_volumes
    held_out = counted(num_held_out, "held-out volume") if num_held_out else "each held-out volume"
    words = {
        VALIDATED_VOLUME: f"{times.get(VALIDATED_VOLUME)} for {counted(p.num_validations, 'validation')} of {held_out}",
        PREVIEWS: f"{times.get(PREVIEWS)} for their previews",
        ENCODED_VOLUME: f"{times.get(ENCODED_VOLUME)} for encoding "
        + (counted(num_train + num_held_out, "volume") if num_train else "each volume"),
    }
    return ", with " + ", ".join(words[name] for name in times)


def dominant_text(p: Prediction, gpu: Gpu) -> str:
    """Return a sentence about what takes most of the time; empty if nothing takes more than half."""
    kind, level, share = dominant_part(p.work_parts, gpu)
    if share < 0.5:
        return ""
    text = f" {share:.0%} of it is {kind}" + ("" if level is None else f" at level {level}")
    if kind == "attention" and level is not None:
        section = "autoencoder" if p.stage == "autoencoder" else "ldm.unet"
        text += (
            f"; {section}.attention_levels without level {level} makes the update "
            f"{1 / max(1e-9, 1 - share):.1f} times cheaper, which is different mathematics"
        )
    return text + "."


def _totals(p: Prediction, num_gpus: int) -> str:
    rows = [
        ["peak", "", ""],
        ["allocated by tensors", gib(p.peak_allocated_bytes), f"in: {p.phase}"],
        *([name, gib(peak["reserved_bytes"]), "reserved"] for name, peak in p.run_peaks.items()),
    ]
    if p.is_for_gpu:
        rows[2:2] = [
            ["reserved, default allocator", gib(p.peak_reserved_default_bytes), ""],
            ["reserved, expandable segments", gib(p.peak_reserved_expandable_bytes), ""],
        ]
        rows.append(["CUDA context (assumed)", gib(p.context_bytes), ""])
    if num_gpus > 1:
        rows.append(["gradient buckets", gib(p.bucket_bytes), "on each GPU"])
        rows.append(["NCCL (assumed)", gib(NCCL_BYTES), "on each GPU"])
    if p.correction != 1.0:
        rows.append(["corrected by measurement", f"x {p.correction:.2f}", p.correction_source])
    margin = f"most in: {p.needing_phase}; margin of this tier ({p.tier}): +{p.margin:.0%}"
    needed = "needed on the device" if num_gpus == 1 else "needed on each GPU"
    if not p.is_for_gpu:
        needed = "needed besides Python itself"
    rows.append([needed, gib(p.needed_bytes(num_gpus)), margin])
    if p.is_for_gpu:
        rows.append(["host memory for offload", gib(p.host_bytes), "pinned, in blocks of powers of two"])
    return table(rows, right=(1,))


def _breakdown(p: Prediction) -> str:
    rows = [["alive at the peak", "", ""]]
    for name, nbytes in sorted(p.breakdown.items(), key=lambda item: -item[1]):
        rows.append([name, gib(nbytes), f"{nbytes / max(1, p.peak_allocated_bytes):.0%}"])
    return table(rows, right=(1, 2))


def _largest(p: Prediction) -> str:
    rows = [["largest tensors at the peak", "", "", ""]]
    for entry in p.largest[:8]:
        shape = "x".join(map(str, entry["shape"]))
        made_by = entry["module"] or entry["category"]
        rows.append([made_by, gib(entry["bytes"]), f"{shape} {entry['dtype']}", f"{entry['op']}, {entry['phase']}"])
    return table(rows, right=(1,))


def _compute(p: Prediction) -> str:
    names = {name: name for name in ("forward", "backward", "recompute", "total")} | {"attention": "of which attention"}
    rows = [["compute of one update", "TFLOP"], *([text, f"{p.flops[n] / 1e12:.2f}"] for n, text in names.items())]
    return table(rows, right=(1,))
