"""What was measured on this machine corrects later predictions for it: one factor per GPU, torch, cuDNN and tier."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from memory.predict.prediction import Prediction

log = logging.getLogger(__name__)

LOWEST, HIGHEST = 0.5, 3.0
"""A factor outside of this is a measurement of something else, such as a second program on the GPU."""


def calibration_file() -> Path:
    """Return where the factors are kept: in the user's cache, for they belong to the machine and not to a run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lean_latent_diffusion_3d" / "memory_calibration.json"


def record(prediction: Prediction, measured_bytes: int) -> float | None:
    """Remember a measured step; return its factor, or None when it is no measurement of this step or cannot be kept.

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
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=2) + "\n")
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        log.warning("memory: what the first step needed is not kept for later predictions (%s)", error)
        return None
    return factor


def corrected(prediction: Prediction) -> Prediction:
    """Return the prediction corrected by what was measured on this machine, or as it is."""
    known = _read()
    if not known:
        return prediction  # so that torch is not imported for nothing
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
