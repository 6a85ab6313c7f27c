"""Group a run's metrics into charts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from memory.predict.prediction import GIB

STAGE_TITLES = {"autoencoder": "Stage 1, autoencoder", "ldm": "Stage 2, latent diffusion"}
MEMORY = re.compile(r"(host_)?memory_")

# Chart titles with the metrics that share their axes; every other metric gets its own chart.
_GROUPS: tuple[tuple[str, str], ...] = (
    ("Reconstruction loss", "reconstruction"),
    ("Held-out PSNR, dB", "val_psnr"),
    ("Held-out SSIM", "val_ssim"),
    ("Held-out mean absolute error", "val_l1"),
    ("Held-out IoU of occupied voxels", "val_iou"),
    ("Held-out Chamfer distance, voxels", "val_chamfer"),
    ("Diffusion loss", "diffusion|val_diffusion"),
    ("Skill: error relative to the best linear denoiser's (below 1 is better)", "val_skill"),
    ("Skill by the noise's share of the variance", r"val_skill_.*"),
    ("Pixel loss", "pixel.*"),
    ("Edge loss", "edges"),
    ("KL divergence", "kl"),
    ("Distance of latents from their codes", "commitment"),
    ("Share of the codes in use", "codebook_use|val_codebook_use"),
    ("Perplexity of the codes", "perplexity|val_perplexity"),
    ("Perceptual loss", "perceptual"),
    ("Adversarial losses", "adversarial|discriminator_fake|discriminator_real"),
    ("Gradient norms", r".*_gradient_norm"),
    ("Learning rates", r".*_learning_rate"),
    ("Volumes per second", "volumes_per_second"),
    ("Share of the time spent waiting for data", "data_wait_share"),
)

_AXES = (
    ("GiB", r"(host_)?memory_.*"),
    ("dB", "val_psnr"),
    ("voxels", "val_chamfer"),
    ("relative error", r"val_skill.*"),
    ("share", "data_wait_share|.*codebook_use|val_iou"),
    ("gradient norm", r".*_gradient_norm"),
    ("learning rate", r".*_learning_rate"),
    ("volumes per second", "volumes_per_second"),
    ("SSIM", "val_ssim"),
    ("perplexity", ".*perplexity"),
    ("loss", ".*"),
)
"""The title of the vertical axis, by metric; the first that fits."""


def axis_of(name: str) -> str:
    """Return the title of the axis of a metric."""
    return next(words for words, pattern in _AXES if re.fullmatch(pattern, name))


def curve_charts(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of all metrics except memory, stage by stage, with the runs overlaid."""
    charts = []
    for stage in STAGE_TITLES:
        names = list(dict.fromkeys(name for _, entry in _stages(runs, stage) for name in entry["curves"]))
        names = [name for name in names if not MEMORY.match(name)]
        for title, pattern in (*_GROUPS, *((name, re.escape(name)) for name in names)):
            members = [name for name in names if re.fullmatch(pattern, name)]
            names = [name for name in names if name not in members]
            if members:
                lines = _series(runs, stage, members)
                about = {"group": STAGE_TITLES[stage], "title": title, "axis": axis_of(members[0])}
                charts.append({**about, "series": lines, "rules": []})
    return charts


def memory_charts(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return charts of memory over time, with the predicted peak as a horizontal line."""
    charts = []
    for stage, title in STAGE_TITLES.items():
        present = list(_stages(runs, stage))
        names = list(dict.fromkeys(name for _, entry in present for name in entry["curves"] if MEMORY.match(name)))
        rules = []
        for run, entry in present:
            prediction = (entry["memory"] or {}).get("prediction")
            # The memory of a whole process on the CPU is not what was predicted.
            if prediction and "memory_peak_gib" in entry["curves"]:
                label = "predicted" if len(runs) == 1 else f"{run['label']}: predicted"
                rules.append({"label": label, "value": prediction["peak_allocated_bytes"] / GIB})
        if names:
            series = _series(runs, stage, names)
            about = {"group": "", "title": f"{title}: memory", "axis": axis_of(names[0])}
            charts.append({**about, "series": series, "rules": rules, "zero": True})
    return charts


def _stages(runs: Sequence[dict[str, Any]], stage: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for run in runs:
        for entry in run["stages"]:
            if entry["name"] == stage:
                yield run, entry


def _series(runs: Sequence[dict[str, Any]], stage: str, members: Sequence[str]) -> list[dict[str, Any]]:
    """Return one line per run and metric; colours distinguish metrics, or runs if there are several."""
    lines = []
    for run, entry in _stages(runs, stage):
        for number, name in enumerate(members):
            if name in entry["curves"]:
                words = name.replace("_", " ").replace("gib", "").strip()
                label = words if len(runs) == 1 else run["label"] if len(members) == 1 else f"{run['label']}: {words}"
                colour, dash = (number, 0) if len(runs) == 1 else (runs.index(run), number)
                lines.append({"label": label, "colour": colour, "dash": dash, "points": entry["curves"][name]})
    return lines
