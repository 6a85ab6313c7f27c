"""From files to tensors: discovery, preparation, transforms, step-addressed batches, phantoms.

Names from modules that need torch are imported on first use, so that finding and checking volumes works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from data.intensity import NETWORK_RANGE
from data.volumes import DataSplit, VolumeFile, prepare_volumes

if TYPE_CHECKING:
    from data.batches import Batch, BatchPlan, ValidationBatches, training_batches
    from data.loading import LoadedVolume, from_unit, in_pose, load_file, load_volume, restore, to_unit

__all__ = [
    "NETWORK_RANGE",
    "Batch",
    "BatchPlan",
    "DataSplit",
    "LoadedVolume",
    "ValidationBatches",
    "VolumeFile",
    "from_unit",
    "in_pose",
    "load_file",
    "load_volume",
    "prepare_volumes",
    "restore",
    "to_unit",
    "training_batches",
]


def __getattr__(name: str) -> Any:
    if name in ("Batch", "BatchPlan", "training_batches", "ValidationBatches"):
        return getattr(import_module("data.batches"), name)
    if name in __all__:
        return getattr(import_module("data.loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
