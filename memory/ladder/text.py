"""Ladders as text for the terminal, and the YAML of the recommended rung."""

from __future__ import annotations

from typing import Any

from memory.kernels.gpus import Gpu
from memory.kernels.timing import hours_range_text
from memory.ladder.rungs import Rung
from memory.ladder.walk import Ladder
from memory.predict.prediction import GIB, Prediction
from memory.predict.text import CPU_TIME, dominant_text, gib, table
from settings import dump_short, known_keys, look_up
from settings.yaml_reader import value_text


def promise(same_mathematics: bool) -> str:
    """Return the promise as the comments of the config word it."""
    return "same mathematics" if same_mathematics else "different mathematics"


def describe_ladder(ladder: Ladder, measured: dict[str, int] | None = None) -> str:
    """Return a table of the rungs, then which one to take; `measured` maps rung names to reserved bytes."""
    head = ["rung", "promise", "allocated", "needed", "host", "moved", "time", "fits"]
    rows = [head + (["measured"] if measured is not None else [])]
    for predicted in ladder.rungs:
        rung, prediction = predicted.rung, predicted.prediction
        is_roomy = predicted.fits_with_margin(ladder.budget_bytes)
        row = [
            rung.name,
            promise(rung.same_mathematics),
            gib(prediction.peak_allocated_bytes),
            gib(prediction.required_bytes),
            gib(prediction.host_bytes),
            f"{prediction.traffic_bytes / GIB:.0f} GiB",
            _hours(prediction, predicted.gpu) if prediction.is_for_gpu else "?",
            "no" if not predicted.fits else "yes" if is_roomy else "yes, without margin",
        ]
        if measured is not None:
            row.append(gib(measured[rung.name]) if rung.name in measured else "failed")
        rows.append(row)
    without_effect = [
        f"{predicted.rung.name}: same peak as the rung above. It lowers {predicted.rung.lowers}, but the peak is in "
        f"{predicted.prediction.phase}."
        for predicted in ladder.without_effect
    ]
    parts = [table(rows, right=(2, 3, 4, 5, 6)), _time_note(ladder), "\n".join(without_effect), _verdict(ladder)]
    return "\n\n".join(part for part in parts if part)


def _hours(prediction: Prediction, gpu: Gpu) -> str:
    return hours_range_text(prediction.hours(gpu), prediction.is_time_measured)


def _time_note(ladder: Ladder) -> str:
    given = ladder.rungs[0].prediction
    if not given.is_for_gpu:
        return CPU_TIME
    return (
        f"Time: of the whole run of {given.max_steps:,} updates on {ladder.gpu.name}, from operations, bytes moved and "
        "kernels." + dominant_text(given, ladder.gpu)
    )


def _verdict(ladder: Ladder) -> str:
    budget = gib(ladder.budget_bytes)
    if ladder.first is None or ladder.fastest is None or ladder.recommended is None:
        smallest = ladder.smallest
        context = smallest.prediction.context_bytes
        needed = gib(smallest.prediction.required_bytes) + (
            f", {gib(context)} of it for the CUDA context" if context else ""
        )
        holder = smallest.prediction.largest[0]
        return (
            f"Nothing on the ladder fits {budget}. The smallest is '{smallest.rung.name}' with "
            f"{needed}; it peaks in {smallest.prediction.phase}, held by "
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
    """Return a value as users write it after `section.key=`."""
    return value_text(value).replace(" ", "")


def as_overrides(rung: Rung) -> str:
    """Return the changes of a rung as users write them on the command line."""
    return " ".join(f"{key}={as_override(value)}" for key, value in rung.changes.items())


def config_with_reasons(ladder: Ladder, source: str) -> str:
    """Return the recommended rung as short as a preset; comments at the top say what changed and why."""
    chosen = ladder.recommended
    assert chosen is not None, "no rung fits, so there is no config to write"
    given = ladder.rungs[0]
    peak, budget = chosen.prediction.required_bytes / GIB, ladder.budget_bytes / GIB
    times = chosen.seconds / given.seconds if given.seconds else 1.0
    lines = [
        f"{source} changed to fit {budget:g} GiB: rung '{chosen.rung.name}' of the {ladder.order} order.",
        f"Predicted for {ladder.stage}: {peak:.2f} GiB with the CUDA context, peak in {chosen.prediction.phase};",
        f"as configured {given.prediction.required_bytes / GIB:.2f} GiB. Time: {times:.2f} times.",
    ]
    fields = dict(known_keys())
    for key, value in chosen.rung.all_changes.items():
        field = fields[key]
        was = look_up(given.rung.settings, key)
        lines.append(f"{key}: {value_text(value)}, was {value_text(was)} ({field.json_schema_extra['promise']})")
        lines.append(f"  {field.description}")
    if not chosen.rung.all_changes:
        lines.append("Nothing had to change.")
    return "".join(f"# {line}\n" for line in lines) + "\n" + dump_short(chosen.rung.settings)
