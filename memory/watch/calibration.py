"""Correct predictions by full steps measured on this machine, kept by device, torch and cuDNN version.

A full step has every optimizer state and every loss term. Measured on the config itself, its ratio replaces the guess;
measured on another config of the same stage and tier, it can only raise a prediction. The margin shrinks with each
measurement and never vanishes, and no prediction falls below the tensors that the step is known to hold.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from memory.kernels.gpus import find_gpu
from memory.predict.prediction import Prediction
from runtime.files.atomic import write_text

log = logging.getLogger(__name__)

LOWEST, HIGHEST = 0.5, 3.0
"""A ratio outside this range measures something else, such as a second program on the GPU."""
TIME = "seconds of an update"
"""What such an entry is of. Older files have entries of "time", of another prediction, which say nothing here."""
FASTEST = 0.2
SLOWEST = 20.0
"""A step that takes longer than so many times its prediction waits for something else, such as data."""
MOST_KEPT = 20
"""How many measurements of one config are kept."""


def calibration_file() -> Path:
    """Return the file of the measurements, in the user's cache because they belong to the machine and not to a run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lean_latent_diffusion_3d" / "memory_calibration.json"


def record(prediction: Prediction, measured_bytes: int) -> float | None:
    """Save what a full step allocated and return its ratio; None if that is implausible or cannot be saved.

    measured_bytes: peak allocated by tensors on CUDA, growth of the resident memory on the CPU.
    """
    ratio = measured_bytes / max(1, prediction.peak_allocated_bytes)
    return _save(prediction, "memory", ratio) if LOWEST <= ratio <= HIGHEST else None


def record_time(prediction: Prediction, measured_seconds: float, predicted_seconds: float) -> float | None:
    """Save how many times its predicted time an update took and return that; None as for `record`."""
    ratio = measured_seconds / max(1e-9, predicted_seconds)
    return _save(prediction, TIME, ratio) if FASTEST <= ratio <= SLOWEST else None


def corrected(prediction: Prediction, gpu_name: str | None = None) -> Prediction:
    """Return the prediction corrected by measurements on this machine, or unchanged if there are none.

    gpu_name: the card that the user named, if any; measurements say nothing about another than this machine's.
    """
    known = _read()
    if not known:
        return prediction  # without importing torch
    if gpu_name is not None and prediction.is_for_gpu and not _is_here(gpu_name):
        return prediction
    key = _key(prediction)
    measured = [entry for entry in known.get(key, []) if _is_alike(entry, prediction)]
    own = [entry for entry in measured if entry["config"] == prediction.config]
    result = prediction
    if times := [entry["ratio"] for entry in own or measured if entry["what"] == TIME]:
        result = replace(result, time_correction=sum(times) / len(times))
    ratios = [entry["ratio"] for entry in own if entry["what"] == "memory"]
    floor = prediction.peak_allocated_bytes / max(1, prediction.peak_reserved_bytes)
    if ratios:
        margin = prediction.margin / (1 + len(ratios))
        source = f"{key}, this config"
        return replace(result, correction=max(floor, *ratios), correction_source=source, margin=margin)
    others = [entry["ratio"] for entry in measured if entry["what"] == "memory"]
    if others and max(others) > 1:
        source = f"{key}, other configs of tier {prediction.tier}"
        return replace(result, correction=max(others), correction_source=source)
    return result


def _is_here(gpu_name: str) -> bool:
    import torch

    return torch.cuda.is_available() and find_gpu(torch.cuda.get_device_name()) == find_gpu(gpu_name)


def _is_alike(entry: Any, prediction: Prediction) -> bool:
    """Return whether a kept measurement says something about a prediction."""
    if not isinstance(entry, dict) or not isinstance(entry.get("ratio"), int | float) or "what" not in entry:
        return False
    return (entry.get("stage"), entry.get("tier")) == (prediction.stage, prediction.tier) and "config" in entry


def _save(prediction: Prediction, what: str, ratio: float) -> float | None:
    key, known = _key(prediction), _read()
    entry = {
        "config": prediction.config,
        "stage": prediction.stage,
        "tier": prediction.tier,
        "what": what,
        "ratio": round(ratio, 4),
    }
    entries = [*known.get(key, []), entry]
    same = [other for other in entries if {**other, "ratio": 0} == {**entry, "ratio": 0}]
    for old in same[:-MOST_KEPT]:
        entries.remove(old)
    known[key] = entries
    try:
        path = calibration_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(known, indent=2) + "\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        log.warning("memory: a measured step cannot be saved for later predictions (%s)", error)
        return None
    return ratio


def _read() -> dict[str, list[Any]]:
    try:
        values = json.loads(calibration_file().read_text())
    except (OSError, RuntimeError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: entries for key, entries in values.items() if isinstance(entries, list)}


def _key(prediction: Prediction) -> str:
    """Return the device that a prediction is for, and the libraries: a GPU says nothing about a CPU."""
    import torch

    device, cudnn = "cpu", "none"
    if prediction.is_for_gpu:
        device = "no GPU"
        if torch.cuda.is_available() and torch.cuda.device_count():
            device, cudnn = torch.cuda.get_device_name(), torch.backends.cudnn.version()
    return f"{device}, torch {torch.__version__}, cuDNN {cudnn}"
