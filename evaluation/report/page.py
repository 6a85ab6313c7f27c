"""Write one run, or a comparison of several, as a single self-contained HTML file; after a validation, its previews.

All outside text on the page passes through `escaped`; the page's script only sets text, never markup. A served page
also takes over the escaped sections of its newer versions.
"""

from __future__ import annotations

import datetime
import html
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.report.run_data import VOLUME_BUDGET_BYTES, read_run
from memory.predict.prediction import GIB
from runtime.files import RunFolder, counted, printable, size_text, write_text
from runtime.processes import Process
from settings import UserError
from training.recording import Recorder, duration_text
from training.validation.previews import Preview, save_picture, save_viewer_volumes

log = logging.getLogger(__name__)

Run = dict[str, Any]
_TEMPLATE = Path(__file__).resolve().parent / "template"
STAGE_TITLES = {"autoencoder": "Stage 1, autoencoder", "ldm": "Stage 2, latent diffusion"}
PICTURES = {"autoencoder": "reconstruction", "ldm": "samples"}
"""The names of the stages' pictures in TensorBoard."""

_CHARTS = (
    ("Reconstruction loss", "loss", "reconstruction"),
    ("Held-out PSNR, dB", "dB", "val_psnr"),
    ("Held-out SSIM", "SSIM", "val_ssim"),
    ("Held-out mean absolute error", "loss", "val_l1"),
    ("Held-out IoU of occupied voxels", "share", "val_iou"),
    ("Held-out Chamfer distance, voxels", "voxels", "val_chamfer"),
    ("Diffusion loss", "loss", "diffusion|val_diffusion"),
    ("Skill: error relative to the best linear denoiser's (below 1 is better)", "relative error", "val_skill"),
    ("Skill by the noise's share of the variance", "relative error", "val_skill_.*"),
    ("Pixel loss", "loss", "pixel.*"),
    ("Edge loss", "loss", "edges"),
    ("KL divergence", "loss", "kl"),
    ("Distance of latents from their codes", "loss", "commitment"),
    ("Share of the codes in use", "share", "codebook_use|val_codebook_use"),
    ("Perplexity of the codes", "perplexity", "perplexity|val_perplexity"),
    ("Perceptual loss", "loss", "perceptual"),
    ("Adversarial losses", "loss", "adversarial|discriminator_fake|discriminator_real"),
    ("Gradient norms", "gradient norm", ".*_gradient_norm"),
    ("Learning rates", "learning rate", ".*_learning_rate"),
    ("Volumes per second", "volumes per second", "volumes_per_second"),
    ("Share of the time spent waiting for data", "share", "data_wait_share"),
    ("memory", "GiB", "(host_)?memory_.*"),
)
"""Title, vertical axis and the metrics that share a chart; every other metric gets its own."""

# On a GPU both peaks are bytes allocated by tensors. On a CPU the reading is the memory of the whole process.
_FIGURES = (
    ("val_psnr", "held-out PSNR", "{:.2f} dB"),
    ("val_ssim", "held-out SSIM", "{:.3f}"),
    ("val_skill", "skill (below 1 is better)", "{:.3f}"),
    ("val_diffusion", "held-out diffusion loss", "{:.4f}"),
    ("volumes_per_second", "volumes per second", "{:.3g}"),
    ("memory_peak_gib", "peak allocated", "{:.2f} GiB"),
    ("host_memory_peak_gib", "peak of the process", "{:.2f} GiB"),
)


def show_validation(recorder: Recorder, step: int, metrics: dict[str, float], preview: Preview | None) -> None:
    """Save the preview as PNG, to TensorBoard and for the report, log the metrics, and write the report.

    The metrics are written after the preview, because their line marks the validation of this step as complete.
    """
    if preview is not None and recorder.process.is_rank_zero:
        path = recorder.run.previews / f"{recorder.stage}_{step:08d}.png"
        title = f"{recorder.run.path.name}, {STAGE_TITLES[recorder.stage].lower()}, step {step:,}"
        recorder.image(step, PICTURES[recorder.stage], save_picture(path, preview.picture, title))
        save_viewer_volumes(recorder.run, recorder.stage, step, preview.volumes)
        log.info("step %d: %s; preview %s", step, ", ".join(f"{n} {v:.4g}" for n, v in metrics.items()), path)
    recorder.write(step, metrics)
    publish(recorder.run, recorder.process)


def publish(run: RunFolder, process: Process) -> None:
    """Write the report of a running training from rank zero; an error is logged and does not end the training."""
    if process.is_rank_zero:
        try:
            write_report(run.path)
        except (OSError, UserError, ValueError, LookupError) as error:
            why = f"{type(error).__name__}: {error}"
            log.warning("%s: not written (%s); the next validation, or scripts/report.py, tries again", run.report, why)


def write_report(run_folder: Path) -> Path:
    """Write report.html from the current files of the run; cheap enough to call after each validation."""
    return write_comparison([run_folder], RunFolder(run_folder).report)


def write_comparison(run_folders: Sequence[Path], target: Path) -> Path:
    """Write one page for one or several runs, with their curves on the same axes."""
    write_text(target, page_of(run_folders))
    return target


def page_of(run_folders: Sequence[Path], version: str = "") -> str:
    """Return the page of one or several runs; a page with a version asks its server for newer ones."""
    runs = [read_run(folder, VOLUME_BUDGET_BYTES // len(run_folders)) for folder in run_folders]
    names = [run["name"] for run in runs]
    for run in runs:
        run["label"] = run["name"] if names.count(run["name"]) == 1 else run["folder"]
    data = {**_charts(runs), **_volumes(runs), "live": version}
    parts = {
        "title": escaped(" vs. ".join(run["label"] for run in runs)),
        "connect": "'self'" if version else "'none'",
        "style": _part("style.css"),
        "script": _part("charts.js") + _part("viewer.js") + (_part("live.js") if version else ""),
        "header": _header(runs, is_live=bool(version)),
        "tiles": _figures(runs),
        "evaluation": _evaluation(runs),
        "memory": _memory(runs),
        "config": _config(runs),
        "environment": _environment(runs),
        # JSON that cannot close the script element that contains it.
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028"),
    }
    pieces = _part("page.html").split("[[")
    # A single pass, so that placeholders inside inserted text are never filled in.
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("]]") for piece in pieces[1:]))


def _part(name: str) -> str:
    return (_TEMPLATE / name).read_text(encoding="utf-8")


def escaped(value: object) -> str:
    """Return outside text as HTML; file names may contain characters that cannot be encoded."""
    return html.escape(printable(value, keep="\n\t"), quote=True)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = f"<thead><tr>{''.join(f'<th>{escaped(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _volumes(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the sets of volumes of all runs for the viewer, and the images that they share."""
    sets: list[dict[str, Any]] = []
    pictures: list[str] = []
    for run in runs:
        for entry in run["viewer"]["sets"]:
            volumes = {r: {**v, "picture": v["picture"] + len(pictures)} for r, v in entry["volumes"].items()}
            sets.append({**entry, "volumes": volumes, "label": f"{run['label']}, " if len(runs) > 1 else ""})
        pictures += run["viewer"]["pictures"]
    return {"sets": sets, "pictures": pictures}


def _charts(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of all metrics, stage by stage, with the runs overlaid; memory with the predicted peak."""
    curves, memory = [], []
    for stage, heading in STAGE_TITLES.items():
        present = [(run, entry) for run in runs for entry in run["stages"] if entry["name"] == stage]
        names = list(dict.fromkeys(name for _, entry in present for name in entry["curves"]))
        for title, axis, pattern in (*_CHARTS, *((name, "loss", re.escape(name)) for name in names)):
            members = [name for name in names if re.fullmatch(pattern, name)]
            names = [name for name in names if name not in members]
            if not members:
                continue
            chart = {"group": heading, "title": title, "axis": axis, "series": _series(runs, present, members)}
            if title != "memory":
                curves.append({**chart, "rules": []})
                continue
            rules = []
            for run, entry in present:
                prediction = (entry["memory"] or {}).get("prediction")
                # The memory of a whole process on the CPU is not what was predicted.
                if prediction and "memory_peak_gib" in entry["curves"]:
                    label = "predicted" if len(runs) == 1 else f"{run['label']}: predicted"
                    rules.append({"label": label, "value": prediction["peak_allocated_bytes"] / GIB})
            memory.append({**chart, "group": "", "title": f"{heading}: memory", "rules": rules, "zero": True})
    return {"curves": curves, "memory": memory}


def _series(runs: Sequence[Run], present: Sequence[tuple[Run, Any]], members: Sequence[str]) -> list[dict[str, Any]]:
    """Return one line per run and metric; colours distinguish metrics, or runs if there are several."""
    lines = []
    for run, entry in present:
        for number, name in enumerate(members):
            if name in entry["curves"]:
                words = name.replace("_", " ").replace("gib", "").strip()
                label = words if len(runs) == 1 else run["label"] if len(members) == 1 else f"{run['label']}: {words}"
                colour, dash = (number, 0) if len(runs) == 1 else (runs.index(run), number)
                lines.append({"label": label, "colour": colour, "dash": dash, "points": entry["curves"][name]})
    return lines


def _header(runs: Sequence[Run], is_live: bool) -> str:
    """Return the names of the runs, the progress and duration of each stage, and the time of writing."""
    blocks = []
    for number, run in enumerate(runs):
        mark = f'<i class="swatch c{number % 6}"></i>' if len(runs) > 1 else ""
        chips = "".join(_chip(stage) for stage in run["stages"]) or '<span class="chip">not started</span>'
        if device := run["environment"].get("device"):
            chips += f'<span class="chip">{escaped(device)}</span>'
        blocks.append(f'<div class="run"><h1>{mark}{escaped(run["label"])}</h1><p class="chips">{chips}</p></div>')
        if report := run["out_of_memory"]:
            rung = report["next_rung"]
            advice = f" Next rung: {escaped(rung['name'])} ({escaped(rung['promise'])})." if rung else ""
            where = f"Ran out of memory in step {report['step'] + 1}, {escaped(report['phase'])}."
            blocks.append(f'<p class="alarm">{where}{advice}</p>')
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
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


def _newest(stage: dict[str, Any], name: str) -> float | None:
    """Return the newest finite value of a metric, of a peak the highest; None if there is none."""
    values = [value for _, value in stage["curves"].get(name, []) if value is not None]
    return None if not values else max(values) if "peak" in name else values[-1]


def _figures(runs: Sequence[Run]) -> str:
    """Return the newest metrics: for one run, how good it is and then the rest; for several, a table.

    Every name has its stage if there are two, so that runs of one and of two stages share rows.
    """
    found: list[tuple[str, str, list[str]]] = []
    for stage in STAGE_TITLES:
        facts = [next((_facts(entry) for entry in run["stages"] if entry["name"] == stage), {}) for run in runs]
        for words in dict.fromkeys(words for one in facts for words in one):
            found.append((stage, words, [one.get(words, "-") for one in facts]))
    has_stages = len({stage for stage, *_ in found}) > 1
    rows = [[words + (f", {_short(stage)}" if has_stages else ""), *values] for stage, words, values in found]
    if len(runs) > 1:
        return _table(["", *(run["label"] for run in runs)], rows)
    if not rows:
        return '<p class="quiet">no metrics yet</p>'
    return f"{_verdict(runs[0])}<details><summary>All figures</summary>{_table([], rows)}</details>"


def _facts(stage: dict[str, Any]) -> dict[str, str]:
    """Return the newest metrics, the peaks and the duration of a stage by their names."""
    values = {words: (form, _newest(stage, name)) for name, words, form in _FIGURES}
    facts = {words: form.format(value) for words, (form, value) in values.items() if value is not None}
    if prediction := (stage["memory"] or {}).get("prediction"):
        facts["predicted peak of the step's tensors"] = size_text(round(prediction["peak_allocated_bytes"]))
    if stage["seconds"] is not None:
        facts["duration"] = duration_text(stage["seconds"])
    return facts


def _verdict(run: Run) -> str:
    """Return a card that says how good the run is: what stage 1 keeps, and what stage 2 has learned."""
    blocks = []
    for stage in run["stages"]:
        if (psnr := _newest(stage, "val_psnr")) is not None:
            error = f"{100 * 10 ** (-psnr / 20):.2g} % of the intensity range"
            words = f"Reconstructions of held-out volumes are off by {error} (RMS)."
            blocks.append(f"<div><b>{psnr:.1f} dB<small>held-out PSNR</small></b>{words}</div>")
        if (skill := _newest(stage, "val_skill")) is not None:
            words = "Stage 2 has learned what no linear model knows."
            if skill >= 1:
                words = "Stage 2 has not yet overtaken the best linear denoiser; train longer."
            blocks.append(f"<div><b>{skill:.3f}<small>skill, below 1 is better</small></b>{words}</div>")
    return f'<div class="card verdict">{"".join(blocks)}</div>' if blocks else ""


def _evaluation(runs: Sequence[Run]) -> str:
    """Return the tables that scripts/evaluate.py printed; empty if it never ran."""
    cards = []
    for run in runs:
        if run["evaluation"] and run["evaluation"]["table"]:
            name = "" if len(runs) == 1 else f"<h3>{escaped(run['label'])}</h3>"
            text = f'<pre class="scroll">{escaped(run["evaluation"]["table"])}</pre>'
            cards.append(f'<div class="card">{name}{text}</div>')
    return f"<section><h2>Evaluation</h2>{''.join(cards)}</section>" if cards else ""


def _memory(runs: Sequence[Run]) -> str:
    """Return the predicted peak and its parts, by run and stage."""
    blocks = []
    for run in runs:
        for stage in run["stages"]:
            name = STAGE_TITLES[stage["name"]] if len(runs) == 1 else f"{run['label']}: {STAGE_TITLES[stage['name']]}"
            predicted = '<p class="quiet">This run has no prediction; scripts/estimate_memory.py makes one.</p>'
            if prediction := (stage["memory"] or {}).get("prediction"):
                by_size = sorted(prediction["breakdown"].items(), key=lambda part: -part[1])
                facts = [
                    ["phase of the peak", prediction["phase"]],
                    ["allocated by tensors", size_text(round(prediction["peak_allocated_bytes"]))],
                    *([f"of which {name}", size_text(round(size))] for name, size in by_size if size > 0),
                    ["needed on the device", size_text(round(prediction["required_bytes"]))],
                    ["needed on the host", size_text(round(prediction["host_bytes"]))],
                    ["a real step may need", f"{prediction['margin']:.0%} more"],
                ]
                predicted = f"<h4>Predicted peak</h4>{_table([], facts)}"
            blocks.append(f'<div class="card"><h3>{escaped(name)}</h3>{predicted}</div>')
    on_cpu = any("host_memory_gib" in stage["curves"] for run in runs for stage in run["stages"])
    note = (
        '<p class="quiet">On a CPU the readings cover the whole process, including Python, libraries and cached '
        "volumes. The prediction covers only the tensors of the step.</p>"
    )
    return f'{note if on_cpu else ""}<div class="pair">{"".join(blocks)}</div>'


def _config(runs: Sequence[Run]) -> str:
    """Return the keys that differ from the defaults or between runs; for one run, also all keys, collapsed."""
    is_one = len(runs) == 1
    labels = ["default", "this run"] if is_one else [run["label"] for run in runs]
    rows = [
        [keys[0]["key"], *([keys[0]["default"]] if is_one else []), *(key["value"] for key in keys)]
        for keys in zip(*(run["config"] for run in runs), strict=True)
    ]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    verb = "differs" if len(differing) == 1 else "differ"
    differences = _table(["key", *labels], differing) if differing else ""
    if not is_one:
        return f"<h3>{counted(len(differing), 'key')} {verb}</h3>{differences}"
    every = _table(["key", "value"], [[row[0], row[-1]] for row in rows])
    head = f"<h3>{len(differing)} of {len(rows)} keys {verb} from the defaults</h3>"
    return f"{head}{differences}<details><summary>All keys</summary>{every}</details>"


def _environment(runs: Sequence[Run]) -> str:
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
    return _table(head, [[name, *(one.get(name, "-") for one in facts)] for name in names])
