"""Files to tensors: discovery and checking, transforms, step-addressed batches, phantoms."""

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
