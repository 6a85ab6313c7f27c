"""What samples are conditioned on: classes, label maps and volumes, as the network takes them."""

from __future__ import annotations

from data import DataSplit, VolumeFile
from data.pairs.label_maps import mask_on_grid
from data.pairs.pairs import MASKS, Pairs, prepare_pairs
from diffusion.conditioning.classes import check_classes, class_number
from diffusion.conditioning.condition import NOTHING, Condition, hidden, some_hidden
from runtime.files.names import counted
from settings import DataError, DataSettings, Settings

__all__ = [
    "NOTHING",
    "Condition",
    "check_classes",
    "check_conditions",
    "class_number",
    "held_out_with_hole",
    "hidden",
    "some_hidden",
]


def check_conditions(settings: Settings, volumes: DataSplit) -> Pairs:
    """Find and check what the volumes are conditioned on; raise with every problem."""
    check_classes(settings.ldm.conditioning, volumes)
    pairs = prepare_pairs(settings.ldm.conditioning, settings.data, volumes)
    # Evaluation would refuse it only after training.
    held_out_with_hole(pairs, volumes, settings.data)
    return pairs


def held_out_with_hole(pairs: Pairs, volumes: DataSplit, data: DataSettings) -> list[VolumeFile]:
    """Return the held-out volumes without those whose mask is empty; raise `DataError` if fewer than two are left."""
    if not pairs.masks:
        return list(volumes.val)
    masks = pairs.masks[len(volumes.train) :]
    found = [file for file, mask in zip(volumes.val, masks, strict=True) if mask_on_grid(mask.path, data).any()]
    if len(found) < 2:
        raise DataError(
            f"{MASKS}: {counted(len(found), 'held-out mask')} with voxels above 0 on the network's grid; evaluation "
            "needs at least 2; add masks, or increase data.val_fraction"
        )
    return found
