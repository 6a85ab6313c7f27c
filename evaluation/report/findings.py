"""The evaluation of a run beside its anchors, and a summary of its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evaluation.report.markup import escaped, table
from runtime.files.names import counted

_RECONSTRUCTION = (("psnr", "PSNR", "{:.2f} dB"), ("ssim", "SSIM", "{:.4f}"), ("ms_ssim", "MS-SSIM", "{:.4f}"))
_PAIRED = (("l1", "L1", "{:.4f}"), ("psnr", "PSNR", "{:.2f} dB"))
_OCCUPANCY = (("iou", "IoU of occupied voxels", "{:.3f}"), ("chamfer", "Chamfer distance", "{:.3f} voxels"))
"""Only in evaluations of mostly empty volumes."""


def evaluation_section(runs: Sequence[dict[str, Any]]) -> str:
    """Return what scripts/evaluate.py found, each figure beside its anchors; empty if it never ran."""
    cards = []
    for run in runs:
        evaluation = run["evaluation"]
        if evaluation:
            name = "" if len(runs) == 1 else f"<h3>{escaped(run['label'])}</h3>"
            cards.append(f'<div class="card">{name}{_scores(evaluation)}</div>')
    if not cards:
        return ""
    return f'<section><h2>Evaluation</h2><div class="pair">{"".join(cards)}</div></section>'


def _scores(evaluation: dict[str, Any]) -> str:
    reconstruction, samples = evaluation["reconstruction"], evaluation.get("samples")
    mean = reconstruction["mean"]
    held_out = len(reconstruction.get("volumes", []))
    rows = [
        [
            f"{words} of reconstructions",
            _number(mean.get(key), form),
            f"mean of {counted(held_out, 'held-out volume')}",
        ]
        for key, words, form in (*_RECONSTRUCTION, *_measured(_OCCUPANCY, mean))
    ]
    rows += _condition_rows(evaluation.get("conditions"))
    if samples:
        skill = "best linear denoiser 1; below 1 the network knows more than mean and covariance"
        rows.append(["skill", _number(evaluation.get("skill", {}).get("val_skill"), "{:.3f}"), skill])
        silent = _number(samples.get("correlation_with_silent_network"), "{:.3f}")
        rows.append(["correlation with samples of a silent network", silent, "1 if the network did nothing"])
        anchors = evaluation.get("anchors", {})
        for words, read in (("sharpness", _gradients), ("edge kurtosis", _kurtosis)):
            compared = "; ".join(f"{name} {read(one)}" for name, one in anchors.items())
            rows.append(
                [f"{words} of {counted(samples['num'], 'sample')}, held-out volumes 1", read(samples), compared]
            )
        real = f"between held-out volumes {_number(samples.get('held_out_pairwise_ms_ssim'))}"
        rows.append(["MS-SSIM between samples", _number(samples.get("pairwise_ms_ssim")), real])
        copies = samples.get("num_memorised")
        rows.append(["near-duplicates of training volumes", _number(copies, "{:.0f}"), _closest(samples)])
        if samples.get("fid"):
            rows.append(["2.5D FID", _number(samples["fid"].get("mean")), "mean of three planes"])
    return table(["", "this run", "compare with"], rows)


def _condition_rows(values: dict[str, Any] | None) -> list[list[str]]:
    """Return the errors of samples against the volumes whose conditions they have."""
    if not values:
        return []
    whose = "its own volume" if values["num"] == 1 else "their own volumes"
    what = f"{counted(values['num'], 'sample')} to {whose}" + (" in the hole" if values.get("region") == "hole" else "")
    others = {"shuffled": "another volume's condition", "hidden": "no condition", "interpolated": "interpolation"}
    rows = []
    for key, name, form in (*_PAIRED, *_measured(_OCCUPANCY, values["right"])):
        compared = [f"{text} {_number(values[n].get(key), form)}" for n, text in others.items() if values.get(n)]
        rows.append([f"{name} of {what}", _number(values["right"].get(key), form), "; ".join(compared)])
    return rows


def _measured(figures: Sequence[tuple[str, str, str]], values: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [figure for figure in figures if values.get(figure[0]) is not None]


def _closest(samples: dict[str, Any]) -> str:
    """Return how near the nearest sample comes to a training volume."""
    ratios = [row["ratio"] for row in samples.get("nearest_training", []) if isinstance(row.get("ratio"), int | float)]
    return f"the nearest is at {min(ratios):.2f} of a held-out volume's distance" if ratios else ""


def _gradients(scores: dict[str, Any]) -> str:
    return _number((scores.get("sharpness") or {}).get("gradient_magnitude"), "{:.2f}")


def _kurtosis(scores: dict[str, Any]) -> str:
    return _number(scores.get("laplacian_kurtosis"), "{:.2f}")


def _number(value: Any, form: str = "{:.4f}") -> str:
    return form.format(value) if isinstance(value, int | float) else "-"


def data_section(runs: Sequence[dict[str, Any]]) -> str:
    """Return source, number of volumes, grid and intensities of each run."""
    facts = [{**run["data"], **_counts(run["environment"].get("data", {}))} for run in runs]
    names = list(dict.fromkeys(name for one in facts for name in one))
    head = [] if len(runs) == 1 else ["", *(run["label"] for run in runs)]
    return table(head, [[name, *(one.get(name, "-") for one in facts)] for name in names])


def _counts(recorded: dict[str, Any]) -> dict[str, str]:
    """Return the numbers that training has recorded; runs of older versions have none."""
    words = {"training": "training volumes", "held_out": "held-out volumes", "classes": "classes"}
    counts = {}
    for key, name in words.items():
        value = recorded.get(key)
        if value not in (None, []):
            counts[name] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return counts
