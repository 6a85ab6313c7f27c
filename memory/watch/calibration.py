"""Correct predictions by full steps that were measured, kept by device, torch and cuDNN version.

A training run measures its own; `python -m memory.watch.calibration check_gpu.md` takes those of the file that
scripts/check_gpu.sh writes, on this machine or on another one. A full step has every optimizer state and every loss
term. Measured on the config itself, its ratio replaces the guess; measured on another config of the same stage and
tier, it can only raise the memory. The margin shrinks with each measurement and never vanishes, and no prediction falls
below the tensors that the step is known to hold.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from memory.kernels.gpus import find_gpu
from memory.predict.prediction import Prediction
from runtime.cli import parser, run
from runtime.files import counted, printable, read_text, reason, write_text
from settings import UserError

log = logging.getLogger(__name__)

What = Literal["memory", "time"]
PLAUSIBLE: dict[What, tuple[float, float]] = {"memory": (0.5, 3.0), "time": (0.2, 20.0)}
"""A ratio outside these measures something else, such as a second program on the GPU, or the wait for data."""
MOST_KEPT = 20
"""How many measurements of one config are kept."""


class Measured(BaseModel):
    """How many times their predictions the steps of one config took."""

    stage: str
    tier: str
    memory: list[float] = []
    time: list[float] = []


class Machine(BaseModel):
    """The card and the libraries that a step was measured with."""

    gpu: str
    torch: str
    cudnn: int | str

    @property
    def key(self) -> str:
        """Return the name under which measurements are kept."""
        return f"{self.gpu}{_VERSION}{self.torch}, cuDNN {self.cudnn}"


class CheckedStep(BaseModel):
    """A step that scripts/check_gpu.sh measured, beside its prediction; `config` is its fingerprint."""

    stage: str
    tier: str
    config: str
    seconds: float
    predicted_seconds: float | None
    peak_allocated_bytes: int
    predicted_peak_allocated_bytes: int


class CheckedGpu(BaseModel):
    """The part that counts of a file that scripts/check_gpu.sh wrote."""

    format: Literal[1]
    machine: Machine
    steps: list[CheckedStep]


_VERSION = ", torch "
_FILE = TypeAdapter(dict[str, dict[str, Measured]])
"""By device and versions, then by config."""


def calibration_file() -> Path:
    """Return the file of the measurements, in the user's cache because they belong to the machine and not to a run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lean_latent_diffusion_3d" / "memory_calibration.json"


def record(prediction: Prediction, what: What, measured: float, predicted: float) -> float | None:
    """Save how many times its prediction a full step took; return that, or None if it is implausible or not saved.

    memory: peak bytes allocated by tensors on CUDA, growth of the resident memory on a CPU; time: seconds.
    """
    known = _read()
    empty = Measured(stage=prediction.stage, tier=prediction.tier)
    config = known.setdefault(_key(prediction), {}).setdefault(prediction.config, empty)
    ratios = _plausible(what, measured, predicted)
    setattr(config, what, [*getattr(config, what), *ratios][-MOST_KEPT:])
    try:
        if ratios:
            _write(known)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        log.warning("memory: a measured step cannot be saved for later predictions (%s)", error)
        return None
    return ratios[0] if ratios else None


def _plausible(what: What, measured: float, predicted: float | None) -> list[float]:
    ratio = measured / max(1e-9, predicted or 0.0)
    return [round(ratio, 4)] if PLAUSIBLE[what][0] <= ratio <= PLAUSIBLE[what][1] else []


def learn(path: Path) -> CheckedGpu:
    """Save the plausible steps of a file that scripts/check_gpu.sh wrote, and return it with those.

    Raises `UserError` if it is no such file, if it has no such step, or for the disk.
    """
    remedy = "files that scripts/check_gpu.sh wrote are allowed; run it again on the machine with the GPU"
    try:
        text = read_text(path)
        checked = CheckedGpu.model_validate_json(text.partition("\n```json\n")[2].partition("\n```")[0] or text)
    except (OSError, ValidationError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"{path}: {why}; {remedy}") from error
    known = _read()
    configs, used = known.setdefault(checked.machine.key, {}), []
    for step in checked.steps:
        memory = _plausible("memory", step.peak_allocated_bytes, step.predicted_peak_allocated_bytes)
        seconds = _plausible("time", step.seconds, step.predicted_seconds)
        if memory or seconds:
            configs[step.config] = Measured(stage=step.stage, tier=step.tier, memory=memory, time=seconds)
            used.append(step)
    if not used:
        raise UserError(f"{path}: no step that is plausible beside its prediction; {remedy}")
    try:
        _write(known)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: cannot be kept ({error}); set XDG_CACHE_HOME to a folder for it") from error
    return checked.model_copy(update={"steps": used})


def corrected(prediction: Prediction, gpu_name: str | None = None) -> Prediction:
    """Return the prediction corrected by what was measured on its device, or unchanged if there is nothing.

    gpu_name: the card that the user named, if any; without, this machine's device counts.
    """
    known = _read()
    if not known:
        return prediction  # without importing torch
    if gpu_name is None or not prediction.is_for_gpu:
        key = _key(prediction)
    else:  # with the libraries that came last
        card = find_gpu(gpu_name)
        key = next((key for key in reversed(known) if card and find_gpu(key.partition(_VERSION)[0]) == card), "")
    configs, tier = known.get(key, {}), (prediction.stage, prediction.tier)
    alike = [measured for measured in configs.values() if (measured.stage, measured.tier) == tier]
    own = configs.get(prediction.config, Measured(stage=prediction.stage, tier=prediction.tier))
    if times := own.time or [ratio for measured in alike for ratio in measured.time]:
        prediction = replace(prediction, time_correction=fmean(times))
    if ratios := own.memory:
        floor = prediction.peak_allocated_bytes / max(1, prediction.peak_reserved_bytes)
        margin, source = prediction.margin / (1 + len(ratios)), f"{key}, this config"
        return replace(prediction, correction=max(floor, *ratios), correction_source=source, margin=margin)
    highest = max((ratio for measured in alike for ratio in measured.memory), default=1.0)
    if highest > 1:
        source = f"{key}, other configs of tier {prediction.tier}"
        return replace(prediction, correction=highest, correction_source=source)
    return prediction


def _write(known: dict[str, dict[str, Measured]]) -> None:
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _FILE.dump_json(known, indent=2).decode() + "\n")


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
    return Machine(gpu=device, torch=str(torch.__version__), cudnn=cudnn).key


if __name__ == "__main__":
    arguments = parser("Correct predictions by what scripts/check_gpu.sh measured on a GPU.", ["check_gpu.md"])
    arguments.add_argument("file", type=Path, help="the file that scripts/check_gpu.sh wrote")

    def main(options: argparse.Namespace) -> int:
        """Read the file and say what it is for."""
        checked = learn(options.file)
        steps = counted(len(checked.steps), "measured step")
        print(f"{printable(checked.machine.gpu)}: later predictions for this card are corrected by {steps}")
        return 0

    sys.exit(run(main, arguments.parse_args()))
