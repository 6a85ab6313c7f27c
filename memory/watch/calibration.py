"""Correct predictions by measurements on this machine: one factor per GPU, torch version, cuDNN version and tier."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from memory.predict.prediction import Prediction
from storage.atomic import write_text

log = logging.getLogger(__name__)

LOWEST, HIGHEST = 0.5, 3.0
"""A factor outside this range measures something else, such as a second program on the GPU."""


def calibration_file() -> Path:
    """Return the file of the factors, in the user's cache because they belong to the machine and not to a run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lean_latent_diffusion_3d" / "memory_calibration.json"


def record(prediction: Prediction, measured_bytes: int) -> float | None:
    """Save the factor of a measured step and return it; return None if it is implausible or cannot be saved.

    measured_bytes: peak reserved by the allocator on CUDA, growth of the resident memory on the CPU.
    """
    factor = measured_bytes / max(1, prediction.peak_reserved_bytes)
    if not LOWEST <= factor <= HIGHEST:
        return None
    known = _read()
    known[_key(prediction.tier)] = {"factor": round(factor, 4), "stage": prediction.stage}
    try:
        path = calibration_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(known, indent=2) + "\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        log.warning("memory: the measurement of the first step cannot be saved for later predictions (%s)", error)
        return None
    return factor


def corrected(prediction: Prediction) -> Prediction:
    """Return the prediction corrected by measurements on this machine, or unchanged if there are none."""
    known = _read()
    if not known:
        return prediction  # without importing torch
    key = _key(prediction.tier)
    return prediction.corrected(known[key]["factor"], key) if key in known else prediction


def _read() -> dict[str, Any]:
    try:
        values = json.loads(calibration_file().read_text())
    except (OSError, RuntimeError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _key(tier: str) -> str:
    import torch

    if torch.cuda.is_available():
        device, cudnn = torch.cuda.get_device_name(), torch.backends.cudnn.version()
    else:
        device, cudnn = "cpu", "none"
    return f"{device}, torch {torch.__version__}, cuDNN {cudnn}, {tier}"
