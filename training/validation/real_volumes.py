"""Real volumes to show beside samples: held-out volumes, and the training volumes that samples come closest to."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from data import DataSplit, VolumeFile, load_volume, to_unit
from data.formats import read_header
from data.geometry import geometry_of
from settings import DataSettings
from training.validation.previews import MAX_COPIES, ViewerVolume
from training.validation.set_metrics import nearest, summary_vector

MAX_COMPARED = 64
"""How many training volumes the samples of a validation are compared with; scripts/evaluate.py compares all."""

MAX_SHOWN = 2 * MAX_COPIES
"""How many held-out volumes are shown: one row beside the samples, and one beside their nearest training volumes."""


def spacing_of(file: VolumeFile, data: DataSettings) -> tuple[float, ...]:
    """Return the distance between neighbouring voxels, in mm, once a volume is on the network's grid."""
    return tuple(map(float, geometry_of(read_header(file.path), data).spacing_mm))


class RealVolumes:
    """Reads held-out and training volumes on first use, and keeps what it needs of them."""

    def __init__(self, volumes: DataSplit, data: DataSettings) -> None:
        train = volumes.train
        chosen = min(len(train), MAX_COMPARED)
        self._train = [train[number * len(train) // chosen] for number in range(chosen)]
        self._num_training = len(train)
        self._val, self._data, self._class_names = volumes.val[:MAX_SHOWN], data, volumes.class_names

    @functools.cached_property
    def held_out(self) -> list[ViewerVolume]:
        """Return the first held-out volumes, as the report shows them."""
        return [self._shown(file, place) for place, file in enumerate(self._val)]

    @functools.cached_property
    def _vectors(self) -> Tensor:
        images = (load_volume(file.path, self._data, file.num_channels).image for file in self._train)
        return torch.stack([summary_vector(to_unit(image)) for image in images])

    def nearest_to(self, samples: Sequence[Tensor]) -> list[ViewerVolume]:
        """Return the training volume nearest to each (C, D, H, W) sample in [0, 1]."""
        vectors = torch.stack([summary_vector(sample) for sample in samples])
        distances, indices = nearest(vectors, self._vectors)
        among = f"nearest of {len(self._train)}"
        if len(self._train) < self._num_training:
            among += f" of {self._num_training}"
        notes = [f"{among} training volumes, distance {distance:.3f}" for distance in distances.tolist()]
        return [
            self._shown(self._train[index], place, note)
            for place, (index, note) in enumerate(zip(indices.tolist(), notes, strict=True))
        ]

    def _shown(self, file: VolumeFile, place: int, note: str = "") -> ViewerVolume:
        loaded = load_volume(file.path, self._data, file.num_channels)
        if self._class_names and file.label is not None:
            note = ", ".join(part for part in (f"class {self._class_names[file.label]}", note) if part)
        spacing_mm = tuple(map(float, loaded.geometry.spacing_mm))
        return ViewerVolume.of(loaded.image, spacing_mm, file.name, note, place)
