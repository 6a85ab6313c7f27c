"""Files to tensors: discovery and checking, transforms, step-addressed batches, phantoms.

The names below are imported on first use, because reading files needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.batches import Batch, BatchPlan, training_batches, validation_batches
    from data.transforms import NETWORK_RANGE, LoadedVolume, from_unit, load_volume, restore, to_unit
    from data.volumes import VolumeFile, Volumes, prepare_volumes

__all__ = [
    "NETWORK_RANGE",
    "Batch",
    "BatchPlan",
    "LoadedVolume",
    "VolumeFile",
    "Volumes",
    "from_unit",
    "load_volume",
    "prepare_volumes",
    "restore",
    "to_unit",
    "training_batches",
    "validation_batches",
]
_MODULE_OF = {
    **dict.fromkeys(("Batch", "BatchPlan", "training_batches", "validation_batches"), "data.batches"),
    **dict.fromkeys(
        ("NETWORK_RANGE", "LoadedVolume", "from_unit", "load_volume", "restore", "to_unit"), "data.transforms"
    ),
    **dict.fromkeys(("VolumeFile", "Volumes", "prepare_volumes"), "data.volumes"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
