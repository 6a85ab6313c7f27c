"""The tables and figures of the page. All outside text on the page passes through `escaped`."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from evaluation.report.charts import STAGE_TITLES
from runtime.files import counted, printable, size_text
from training.recording import duration_text

Run = dict[str, Any]
_METRICS = (
    ("val_psnr", "held-out PSNR", "{:.2f} dB"),
    ("val_ssim", "held-out SSIM", "{:.3f}"),
    ("val_skill", "skill (below 1 is better)", "{:.3f}"),
    ("val_diffusion", "held-out diffusion loss", "{:.4f}"),
    ("volumes_per_second", "volumes per second", "{:.3g}"),
)
# On a GPU both are bytes allocated by tensors. On a CPU the reading is the memory of the whole process.
_PEAKS = (
    ("memory_peak_gib", "peak allocated", "{:.2f} GiB"),
    ("host_memory_peak_gib", "peak of the process", "{:.2f} GiB"),
)


def escaped(value: object) -> str:
    """Return outside text as HTML."""
    # File names may contain characters that cannot be encoded.
    return html.escape(printable(value, keep="\n\t"), quote=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of escaped text."""
    top = f"<thead><tr>{''.join(f'<th>{escaped(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def header_section(runs: Sequence[Run], written: str, is_live: bool = False) -> str:
    """Return the names of the runs, the progress and duration of each stage, and the time of writing."""
    blocks = []
    for number, run in enumerate(runs):
        mark = f'<i class="swatch c{number % 6}"></i>' if len(runs) > 1 else ""
        chips = "".join(_chip(stage) for stage in run["stages"]) or '<span class="chip">not started</span>'
        if device := run["environment"].get("device"):
            chips += f'<span class="chip">{escaped(device)}</span>'
        blocks.append(f'<div class="run"><h1>{mark}{escaped(run["label"])}</h1><p class="chips">{chips}</p></div>')
        blocks.append(_alarm(run["out_of_memory"]))
    live = '<span class="chip" id="live">live</span> ' if is_live else ""
    return f'{"".join(blocks)}<p class="quiet">{live}written {escaped(written)}</p>'


def _chip(stage: dict[str, Any]) -> str:
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
    return f'<span class="chip {kind}" style="--share:{share:.1f}%">{_short(stage["name"])}: {progress}</span>'


def _short(stage: str) -> str:
    """Return "stage 1" or "stage 2"."""
    return STAGE_TITLES[stage].split(",")[0].lower()


def _alarm(report: dict[str, Any] | None) -> str:
    if not report:
        return ""
    rung = report["next_rung"]
    advice = f" Next rung: {escaped(rung['name'])} ({escaped(rung['promise'])})." if rung else ""
    return f'<p class="alarm">Ran out of memory in step {report["step"] + 1}, {escaped(report["phase"])}.{advice}</p>'


def tiles_section(runs: Sequence[Run]) -> str:
    """Return the newest metrics: for one run, how good it is and then the rest; for several, a table.

    Every name has its stage if there are two, so that runs of one and of two stages share rows.
    """
    found: list[tuple[str, str, list[str]]] = []
    for stage in STAGE_TITLES:
        facts = [next((_facts(entry) for entry in run["stages"] if entry["name"] == stage), {}) for run in runs]
        for words in dict.fromkeys(words for one in facts for words in one):
            values = [one.get(words) or "-" for one in facts]
            found += [(stage, words, values)] if values != ["-"] * len(runs) else []
    has_stages = len({stage for stage, *_ in found}) > 1
    rows = [[words + (f", {_short(stage)}" if has_stages else ""), *values] for stage, words, values in found]
    if len(runs) > 1:
        return table(["", *(run["label"] for run in runs)], rows)
    if not rows:
        return '<p class="quiet">no metrics yet</p>'
    return f"{_verdict(runs[0])}<details><summary>All figures</summary>{table([], rows)}</details>"


def _verdict(run: Run) -> str:
    """Return a card that says how good the run is: what stage 1 keeps, and what stage 2 has learned."""
    newest = {
        name: next((value for _, value in reversed(stage["curves"].get(name, [])) if value is not None), None)
        for stage in run["stages"]
        for name in ("val_psnr", "val_skill")
        if name in stage["curves"]
    }
    cards = []
    if (psnr := newest.get("val_psnr")) is not None:
        error = f"{100 * 10 ** (-psnr / 20):.2g} % of the intensity range"
        cards.append(
            (f"{psnr:.1f} dB", "held-out PSNR", f"Reconstructions of held-out volumes are off by {error} (RMS).")
        )
    if (skill := newest.get("val_skill")) is not None:
        words = (
            "Stage 2 has learned what no linear model knows."
            if skill < 1
            else "Stage 2 has not yet overtaken the best linear denoiser; train longer."
        )
        cards.append((f"{skill:.3f}", "skill, below 1 is better", words))
    blocks = [
        f"<div><b>{value}<small>{escaped(name)}</small></b>{escaped(words)}</div>" for value, name, words in cards
    ]
    return f'<div class="card verdict">{"".join(blocks)}</div>' if blocks else ""


def _facts(stage: dict[str, Any]) -> dict[str, str | None]:
    """Return the newest metrics, the peaks and the duration of a stage by their names; None for what is missing."""
    facts: dict[str, str | None] = {}
    for choose, names in ((lambda values: values[-1], _METRICS), (max, _PEAKS)):
        for name, words, form in names:
            values = [value for _, value in stage["curves"].get(name, []) if value is not None]
            facts[words] = form.format(choose(values)) if values else None
    prediction = (stage["memory"] or {}).get("prediction")
    facts["predicted peak of the step's tensors"] = (
        size_text(round(prediction["peak_allocated_bytes"])) if prediction else None
    )
    facts["duration"] = None if stage["seconds"] is None else duration_text(stage["seconds"])
    return facts


def evaluation_section(runs: Sequence[Run]) -> str:
    """Return the tables that scripts/evaluate.py printed; empty if it never ran."""
    cards = []
    for run in runs:
        if run["evaluation"] and run["evaluation"]["table"]:
            name = "" if len(runs) == 1 else f"<h3>{escaped(run['label'])}</h3>"
            cards.append(
                f'<div class="card">{name}<pre class="scroll">{escaped(run["evaluation"]["table"])}</pre></div>'
            )
    return f"<section><h2>Evaluation</h2>{''.join(cards)}</section>" if cards else ""


def memory_section(runs: Sequence[Run]) -> str:
    """Return the predicted peak and its parts, by run and stage."""
    blocks = []
    for run in runs:
        for stage in run["stages"]:
            name = STAGE_TITLES[stage["name"]] if len(runs) == 1 else f"{run['label']}: {STAGE_TITLES[stage['name']]}"
            predicted = _breakdown((stage["memory"] or {}).get("prediction"))
            blocks.append(f'<div class="card"><h3>{escaped(name)}</h3>{predicted}</div>')
    on_cpu = any("host_memory_gib" in stage["curves"] for run in runs for stage in run["stages"])
    note = (
        '<p class="quiet">On a CPU the readings cover the whole process, including Python, libraries and cached '
        "volumes. The prediction covers only the tensors of the step.</p>"
    )
    return f'{note if on_cpu else ""}<div class="pair">{"".join(blocks)}</div>'


def _breakdown(prediction: dict[str, Any] | None) -> str:
    if not prediction:
        return '<p class="quiet">This run has no prediction; scripts/estimate_memory.py makes one.</p>'
    by_size = sorted(prediction["breakdown"].items(), key=lambda part: -part[1])
    facts = [
        ["phase of the peak", prediction["phase"]],
        ["allocated by tensors", size_text(round(prediction["peak_allocated_bytes"]))],
        *([f"of which {name}", size_text(round(size))] for name, size in by_size if size > 0),
        ["needed on the device", size_text(round(prediction["required_bytes"]))],
        ["needed on the host", size_text(round(prediction["host_bytes"]))],
        ["a real step may need", f"{prediction['margin']:.0%} more"],
    ]
    return f"<h4>Predicted peak</h4>{table([], facts)}"


def config_section(runs: Sequence[Run]) -> str:
    """Return the keys that differ from the defaults or between runs; for one run, also all keys, collapsed."""
    is_one = len(runs) == 1
    labels = ["default", "this run"] if is_one else [run["label"] for run in runs]
    rows = [
        [keys[0]["key"], *([keys[0]["default"]] if is_one else []), *(key["value"] for key in keys)]
        for keys in zip(*(run["config"] for run in runs), strict=True)
    ]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    verb = "differs" if len(differing) == 1 else "differ"
    differences = table(["key", *labels], differing) if differing else ""
    if not is_one:
        return f"<h3>{counted(len(differing), 'key')} {verb}</h3>{differences}"
    every = table(["key", "value"], [[row[0], row[-1]] for row in rows])
    head = f"<h3>{len(differing)} of {len(rows)} keys {verb} from the defaults</h3>"
    return f"{head}{differences}<details><summary>All keys</summary>{every}</details>"


def environment_section(runs: Sequence[Run]) -> str:
    """Return the command, machine and packages of each run, and how many volumes it has; a column for each run."""
    facts = []
    for run in runs:
        known = {"packages": {}, "command": [], "data": {}, **run["environment"]}
        rest = {name: value for name, value in known.items() if name not in ("packages", "command", "data")}
        volumes = {f"{name.replace('_', '-')} volumes": known["data"].get(name) for name in ("training", "held_out")}
        flat = {"folder": run["folder"], "command": " ".join(known["command"]), **volumes, **rest, **known["packages"]}
        facts.append({name: str(value) for name, value in flat.items() if value not in (None, "")})
    names = dict.fromkeys(name for one in facts for name in one)
    head = [] if len(runs) == 1 else ["", *(run["label"] for run in runs)]
    return table(head, [[name, *(one.get(name, "-") for one in facts)] for name in names])
