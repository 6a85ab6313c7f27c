"""Correct predictions by full steps measured on this machine, kept by device, torch and cuDNN version.

A full step has every optimizer state and every loss term. Measured on the config itself, its ratio replaces the guess;
measured on another config of the same stage and tier, it can only raise a prediction. The margin shrinks with each
measurement and never vanishes, and no prediction falls below the tensors that the step is known to hold.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, TypeAdapter

from memory.kernels.gpus import find_gpu
from memory.predict.prediction import Prediction
from runtime.files import write_text

log = logging.getLogger(__name__)

LOWEST, HIGHEST = 0.5, 3.0
"""A ratio outside this range measures something else, such as a second program on the GPU."""
FASTEST = 0.2
SLOWEST = 20.0
"""A step that takes longer than so many times its prediction waits for something else, such as data."""
MOST_KEPT = 20
"""How many measurements of one config are kept."""


class Measured(BaseModel):
    """How many times their predictions the steps of one config took."""

    stage: str
    tier: str
    memory: list[float] = []
    time: list[float] = []


_FILE = TypeAdapter(dict[str, dict[str, Measured]])
"""By device and versions, then by config."""


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
    return _save(prediction, "time", ratio) if FASTEST <= ratio <= SLOWEST else None


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
    configs, tier = known.get(key, {}), (prediction.stage, prediction.tier)
    alike = [measured for measured in configs.values() if (measured.stage, measured.tier) == tier]
    own = configs.get(prediction.config, Measured(stage=prediction.stage, tier=prediction.tier))
    result = prediction
    if times := own.time or [ratio for measured in alike for ratio in measured.time]:
        result = replace(result, time_correction=fmean(times))
    if ratios := own.memory:
        floor = prediction.peak_allocated_bytes / max(1, prediction.peak_reserved_bytes)
        margin, source = prediction.margin / (1 + len(ratios)), f"{key}, this config"
        return replace(result, correction=max(floor, *ratios), correction_source=source, margin=margin)
    highest = max((ratio for measured in alike for ratio in measured.memory), default=1.0)
    if highest > 1:
        source = f"{key}, other configs of tier {prediction.tier}"
        return replace(result, correction=highest, correction_source=source)
    return result


def _is_here(gpu_name: str) -> bool:
    import torch

    return torch.cuda.is_available() and find_gpu(torch.cuda.get_device_name()) == find_gpu(gpu_name)


def _save(prediction: Prediction, what: str, ratio: float) -> float | None:
    known, empty = _read(), Measured(stage=prediction.stage, tier=prediction.tier)
    measured = known.setdefault(_key(prediction), {}).setdefault(prediction.config, empty)
    setattr(measured, what, [*getattr(measured, what), round(ratio, 4)][-MOST_KEPT:])
    try:
        path = calibration_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, _FILE.dump_json(known, indent=2).decode() + "\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        log.warning("memory: a measured step cannot be saved for later predictions (%s)", error)
        return None
    return ratio


def _read() -> dict[str, dict[str, Measured]]:
    try:
        return _FILE.validate_json(calibration_file().read_text())
    except (OSError, RuntimeError, ValueError):
        return {}


def _key(prediction: Prediction) -> str:
    """Return the device that a prediction is for, and the libraries: a GPU says nothing about a CPU."""
    import torch

    device, cudnn = "cpu", "none"
    if prediction.is_for_gpu:
        device = "no GPU"
        if torch.cuda.is_available() and torch.cuda.device_count():
            device, cudnn = torch.cuda.get_device_name(), torch.backends.cudnn.version()
    return f"{device}, torch {torch.__version__}, cuDNN {cudnn}"
