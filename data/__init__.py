"""Files to tensors: discovery and checking, transforms, step-addressed batches, phantoms."""

from data.batches import Batch, BatchPlan, training_batches, validation_batches
from data.transforms import NETWORK_RANGE, LoadedVolume, from_unit, load_volume, restore, to_unit
from data.volumes import DataSplit, VolumeFile, prepare_volumes

__all__ = [
    "NETWORK_RANGE",
    "Batch",
    "BatchPlan",
    "DataSplit",
    "LoadedVolume",
    "VolumeFile",
    "from_unit",
    "load_volume",
    "prepare_volumes",
    "restore",
    "to_unit",
    "training_batches",
    "validation_batches",
]
