"""The header, figures, memory, config and environment of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evaluation.report.charts import STAGE_TITLES, highest, last
from evaluation.report.markup import escaped, gib, table
from runtime.files.names import counted
from training.recording.progress import duration_text

_FIGURES = (
    ("val_psnr", "held-out PSNR", "{:.2f} dB"),
    ("val_ssim", "held-out SSIM", "{:.3f}"),
    ("val_skill", "skill (below 1 is better)", "{:.3f}"),
    ("val_diffusion", "held-out diffusion loss", "{:.4f}"),
    ("volumes_per_second", "volumes per second", "{:.3g}"),
)
_BREAKDOWN = ("activations", "parameters", "gradients", "optimizer", "ema", "inputs", "other")


def page_title(runs: Sequence[dict[str, Any]]) -> str:
    """Return the title of the page."""
    return escaped(" vs. ".join(run["label"] for run in runs))


def header_section(runs: Sequence[dict[str, Any]], written: str, is_live: bool = False) -> str:
    """Return the names of the runs, the progress and duration of each stage, and the time of writing."""
    blocks = []
    for number, run in enumerate(runs):
        mark = f'<i class="swatch c{number % 6}"></i>' if len(runs) > 1 else ""
        chips = "".join(_chip(stage) for stage in run["stages"]) or '<span class="chip">not started</span>'
        device = run["environment"].get("device")
        device_chip = f'<span class="chip">{escaped(device)}</span>' if device else ""
        blocks.append(
            f'<div class="run"><h1>{mark}{escaped(run["label"])}</h1><p class="chips">{chips}{device_chip}</p></div>'
        )
        blocks.append(_alarm(run["out_of_memory"]))
    live = '<span class="chip" id="live">live</span> ' if is_live else ""
    return f'{"".join(blocks)}<p class="quiet">{live}written {escaped(written)}</p>'


def _chip(stage: dict[str, Any]) -> str:
    name = STAGE_TITLES[stage["name"]].split(",")[0].lower()
    share = 100 * stage["step"] / max(1, stage["max_steps"])
    if stage["is_finished"]:
        kind, progress = "good", f"done, {counted(stage['step'], 'step')}"
    elif stage["max_hours"] is not None:
        limit = 3600 * stage["max_hours"]
        share = 100 * (stage["seconds"] or 0) / limit
        kind, progress = "going", f"step {stage['step']:,}, to train for {duration_text(limit)}"
    else:
        kind, progress = "going", f"step {stage['step']:,} of {stage['max_steps']:,}"
    if stage["seconds"] is not None:
        progress += f", {duration_text(stage['seconds'])}"
    return f'<span class="chip {kind}" style="--share:{share:.1f}%">{name}: {progress}</span>'


def _alarm(report: dict[str, Any] | None) -> str:
    if not report:
        return ""
    rung = report.get("next_rung") or {}
    advice = f" Next rung: {escaped(rung['name'])} ({escaped(rung['promise'])})." if rung else ""
    return (
        f'<p class="alarm">Ran out of memory in step {escaped(report.get("step", 0) + 1)}, '
        f"{escaped(report.get('phase', ''))}.{advice}</p>"
    )


def tiles_section(runs: Sequence[dict[str, Any]]) -> str:
    """Return the newest metrics, as tiles for one run or as a table for several.

    In a comparison every row names its stage, so that runs of one and of two stages share rows.
    """
    has_stages = any(len(run["stages"]) > 1 for run in runs) or len({_stage_names(run) for run in runs}) > 1
    facts = {run["label"]: _figures(run, has_stages) for run in runs}
    if len(runs) == 1:
        tiles = [
            f'<div class="tile"><b>{escaped(value)}</b><span>{escaped(name)}</span></div>'
            for name, value in facts[runs[0]["label"]].items()
        ]
        return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else '<p class="quiet">no metrics yet</p>'
    order = [name for stage in STAGE_TITLES for name in _figure_names(stage, has_stages)]
    names = [name for name in order if any(name in figures for figures in facts.values())]
    rows = [[name, *(figures.get(name, "-") for figures in facts.values())] for name in names]
    return table(["", *facts], rows)


def _stage_names(run: dict[str, Any]) -> tuple[str, ...]:
    return tuple(stage["name"] for stage in run["stages"])


# On a GPU both are bytes allocated by tensors. On a CPU the reading is the memory of the whole process.
_READINGS = (("memory_peak_gib", "peak allocated"), ("host_memory_peak_gib", "peak of the process"))
_PREDICTED = "predicted peak of the step's tensors"


def _which(stage: str, has_stages: bool) -> str:
    return f", {STAGE_TITLES[stage].split(',')[0].lower()}" if has_stages else ""


def _figure_names(stage: str, has_stages: bool) -> list[str]:
    words = [words for _, words, _ in _FIGURES] + [words for _, words in _READINGS] + [_PREDICTED, "duration"]
    return [word + _which(stage, has_stages) for word in words]


def _figures(run: dict[str, Any], has_stages: bool) -> dict[str, str]:
    figures = {}
    for stage in run["stages"]:
        which = _which(stage["name"], has_stages)
        for name, words, form in _FIGURES:
            value = last(stage, name)
            if value is not None:
                figures[words + which] = form.format(value)
        for name, words in _READINGS:
            peak = highest(stage, name)
            if peak is not None:
                figures[words + which] = f"{peak:.2f} GiB"
        prediction = (stage["memory"] or {}).get("prediction")
        if prediction:
            figures[_PREDICTED + which] = gib(prediction["peak_allocated_bytes"])
        if stage["seconds"] is not None:
            figures["duration" + which] = duration_text(stage["seconds"])
    return figures


def memory_section(runs: Sequence[dict[str, Any]]) -> str:
    """Return the predicted breakdown and the position on the ladder, by run and stage."""
    blocks = []
    for run in runs:
        for stage in run["stages"]:
            name = STAGE_TITLES[stage["name"]] if len(runs) == 1 else f"{run['label']}: {STAGE_TITLES[stage['name']]}"
            memory = stage["memory"] or {}
            parts = [_breakdown(memory.get("prediction")), _ladder(memory.get("ladder"))]
            blocks.append(f'<div class="card"><h3>{escaped(name)}</h3>{"".join(parts)}</div>')
    on_cpu = any("host_memory_gib" in stage["curves"] for run in runs for stage in run["stages"])
    note = (
        '<p class="quiet">On a CPU the readings cover the whole process, including Python, libraries and cached '
        "volumes. The prediction covers only the tensors of the step.</p>"
    )
    return f'{note if on_cpu else ""}<div class="pair">{"".join(blocks)}</div>'


def _breakdown(prediction: dict[str, Any] | None) -> str:
    if not prediction:
        return '<p class="quiet">This run has no prediction; scripts/report.py --predict adds one.</p>'
    total = max(1, prediction["peak_allocated_bytes"])
    parts = [(name, prediction["breakdown"].get(name, 0)) for name in _BREAKDOWN]
    shown = sorted(((name, size) for name, size in parts if size > 0), key=lambda part: -part[1])
    colours = {name: f"c{number}" for number, name in enumerate(_BREAKDOWN)}
    bar = "".join(
        f'<i class="{colours[name]}" style="flex:{size / total:.5f}" title="{name} {gib(size)}"></i>'
        for name, size in shown
    )
    legend = "".join(f'<li><i class="swatch {colours[name]}"></i>{name}<b>{gib(size)}</b></li>' for name, size in shown)
    facts = [
        ["phase of the peak", prediction["phase"]],
        ["allocated by tensors", gib(prediction["peak_allocated_bytes"])],
        ["needed on the device", gib(prediction.get("required_bytes", prediction["peak_reserved_bytes"]))],
        ["needed on the host", gib(prediction["host_bytes"])],
        ["a real step may need", f"{prediction['margin']:.0%} more"],
    ]
    return (
        f'<h4>Predicted peak by category</h4><div class="bar">{bar}</div><ul class="legend">{legend}</ul>'
        f"{table([], facts)}"
    )


def _ladder(ladder: list[dict[str, Any]] | None) -> str:
    if not ladder:
        return ""
    left = [rung for rung in ladder if rung["state"] == "left"]
    same = sum(rung["same_mathematics"] for rung in left)
    marks = {"taken": "✓", "here": "●", "left": "○"}
    rungs = "".join(
        f'<li class="{escaped(rung["state"])}{"" if rung["same_mathematics"] else " other"}">'
        f"<span>{marks.get(rung['state'], '')}</span>{escaped(rung['name'])}</li>"
        for rung in ladder
    )
    return (
        f'<h4>Position on the ladder</h4><p class="quiet">Rungs left: {same} with the same mathematics, '
        f'{len(left) - same} with different mathematics</p><ol class="ladder">{rungs}</ol>'
    )


def config_section(runs: Sequence[dict[str, Any]]) -> str:
    """Return the keys that differ from the defaults or between runs; for one run, also all keys, collapsed."""
    if len(runs) == 1:
        config = runs[0]["config"]
        changed = [[k["key"], k["default"], k["value"]] for k in config["keys"] if k["default"] != k["value"]]
        verb = "differs" if len(changed) == 1 else "differ"
        head = f"<h3>{len(changed)} of {len(config['keys'])} keys {verb} from the defaults</h3>"
        differences = table(["key", "default", "this run"], changed) if changed else ""
        every = [[key["key"], key["value"]] for key in config["keys"]]
        return f"{head}{differences}<details><summary>All keys</summary>{table(['key', 'value'], every)}</details>"
    values = [{key["key"]: key["value"] for key in run["config"]["keys"]} for run in runs]
    keys = list(dict.fromkeys(key for one in values for key in one))
    rows = [[key, *(one.get(key, "") for one in values)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    labels = [run["label"] for run in runs]
    verb = "differs" if len(differing) == 1 else "differ"
    return f"<h3>{counted(len(differing), 'key')} {verb}</h3>{table(['key', *labels], differing)}"


def environment_section(runs: Sequence[dict[str, Any]]) -> str:
    """Return the command, machine and packages of each run."""
    facts: list[dict[str, str]] = []
    for run in runs:
        environment = dict(run["environment"])
        packages = environment.pop("packages", {})
        command = environment.pop("command", [])
        environment.pop("data", None)
        flat = {"folder": run["folder"], "command": " ".join(map(str, command)), **environment, **packages}
        facts.append({name: str(value) for name, value in flat.items() if value not in (None, "")})
    names = list(dict.fromkeys(name for one in facts for name in one))
    head = [] if len(runs) == 1 else ["", *(run["label"] for run in runs)]
    return table(head, [[name, *(one.get(name, "") for one in facts)] for name in names])
