"""Real steps of the presets and of variants through torch's CUDA allocators, beside the replayed prediction.

Needs torch with CUDA. The device need not compute: one whose kernels do nothing shows the same allocations, except for
the workspaces of convolutions, which cuDNN chooses by itself; they are left out on both sides then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memory.ladder.measured_step import MeasuredStep, measure_in_process
from memory.predict.allocator import AllocatorLimits, replay_pinned
from memory.predict.history import replay_training
from memory.predict.prediction import Stage
from memory.predict.step import track_step
from memory.predict.tracker import CONVOLUTION_WORKSPACES
from settings import Settings, load_settings

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TRAINING = "autoencoder.training"
_CHECKPOINTED = {f"{TRAINING}.use_gradient_checkpointing": True}
_OFFLOAD = {**_CHECKPOINTED, f"{TRAINING}.use_gradient_checkpointing_offload": True}
_UNET_CHECKPOINTED = {"ldm.training.use_gradient_checkpointing": True}
_KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {**_CHECKPOINTED, f"{TRAINING}.use_nested_checkpointing": False},
    "nested": {**_CHECKPOINTED, f"{TRAINING}.use_nested_checkpointing": True},
    "offload": _OFFLOAD,
    "slabs of 16": {**_CHECKPOINTED, f"{TRAINING}.slab_rows": 16},
    "slabs of 8, offload": {**_OFFLOAD, f"{TRAINING}.slab_rows": 8},
    "stock": {"autoencoder.implementation": "monai"},
    "stock, checkpointed": {"autoencoder.implementation": "monai", **_CHECKPOINTED},
    "default allocator": {**_CHECKPOINTED, "device.allocator": ""},
    "fp32": {**_CHECKPOINTED, "device.mixed_precision": False},
}
_UNET_KNOBS: dict[str, dict[str, Any]] = {
    "checkpointed": _UNET_CHECKPOINTED,
    "offload": {**_UNET_CHECKPOINTED, "ldm.training.use_gradient_checkpointing_offload": True},
    "pixel loss, slabs of 8": {"ldm.training.pixel_loss.weight": 0.1, f"{TRAINING}.slab_rows": 8, **_CHECKPOINTED},
}
_RESET = {
    f"{TRAINING}.use_gradient_checkpointing": False,
    f"{TRAINING}.use_gradient_checkpointing_offload": False,
    f"{TRAINING}.use_nested_checkpointing": "auto",
    f"{TRAINING}.slab_rows": 0,
}
_PARTS = ("allocated", "reserved", "host")
VARIED = ("high_res", "balanced")


def variants() -> dict[str, tuple[Settings, Stage]]:
    """Return the settings of every row by its name: both stages of the presets, then what the knobs make of some."""
    rows: dict[str, tuple[Settings, Stage]] = {}
    stages: tuple[Stage, Stage] = ("autoencoder", "ldm")
    for path in sorted(CONFIGS.glob("*.yaml")):
        for number, stage in enumerate(stages, start=1):
            rows[f"{path.stem}, stage {number}"] = (load_settings(path, stage=stage), stage)
    for preset in VARIED:
        first = load_settings(CONFIGS / f"{preset}.yaml").with_overrides(_RESET)
        for name, changes in _KNOBS.items():
            rows[f"{preset}, {name}"] = (first.with_overrides(changes), "autoencoder")
        second = load_settings(CONFIGS / f"{preset}.yaml", stage="ldm")
        for name, changes in _UNET_KNOBS.items():
            rows[f"{preset}, stage 2, {name}"] = (second.with_overrides(changes), "ldm")
    return {name: (_on_cuda(settings), stage) for name, (settings, stage) in rows.items()}


def _on_cuda(settings: Settings) -> Settings:
    """Return the settings for a GPU, with the precision that a current one chooses."""
    return settings.with_overrides({"device.type": "cuda"})


def compare(name: str, settings: Settings, stage: Stage, has_workspaces: bool) -> dict[str, Any]:
    """Return what the allocators held and what the replay says, in bytes; measured values are 0 if the steps fail."""
    peaks = measure_in_process(settings, stage) or MeasuredStep(0, 0, 0)
    measured = (peaks.peak_allocated_bytes, peaks.peak_reserved_bytes, peaks.host_bytes)
    return _row(name, measured, predict(settings, stage, has_workspaces))


def predicted_again(
    kept: dict[str, Any], name: str, settings: Settings, stage: Stage, has_workspaces: bool
) -> dict[str, Any]:
    """Return a row with its measured values as they were and new predictions."""
    return _row(name, tuple(kept[part][0] for part in _PARTS), predict(settings, stage, has_workspaces))


def _row(name: str, measured: tuple[int, ...], predicted: tuple[int, ...]) -> dict[str, Any]:
    pairs = zip(_PARTS, measured, predicted, strict=True)
    return {"name": name, **{part: [first, second] for part, first, second in pairs}}


def predict(settings: Settings, stage: Stage, has_workspaces: bool) -> tuple[int, int, int]:
    """Return the predicted peaks: allocated, reserved, and pinned on the host."""
    tracker = track_step(settings, stage)
    left_out = () if has_workspaces else (CONVOLUTION_WORKSPACES,)
    on_host = [record.nbytes if record.place == "host" else 0 for record in tracker.allocations]
    allocator = replay_training(tracker, AllocatorLimits.parse(settings.device.allocator), left_out)
    return allocator.peak_allocated, allocator.peak_reserved, replay_pinned(tracker.trace, on_host)
