"""Small volumes and settings for the tests of data/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data.discovery import DiscoveredVolume
from data.formats import read_stored
from data.header import Header
from settings import DataSettings

AFFINE = np.array([[2.0, 0, 0, -10], [0, 2.5, 0, -12], [0, 0, 3.0, 5], [0, 0, 0, 1]])


def build_settings(**values: Any) -> DataSettings:
    """Data settings with a small grid and no workers unless said otherwise."""
    return DataSettings.model_validate({"voxel_size": [12, 10, 8], "num_workers": 0, **values})


def discovered(*names: str) -> list[DiscoveredVolume]:
    """Volumes of these names, which need not exist."""
    return [DiscoveredVolume(Path(name), name) for name in names]


def random_voxels(seed: int, shape: tuple[int, ...] = (1, 12, 10, 8)) -> np.ndarray:
    """A channel-first volume of smooth numbers with some noise."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 300, int(np.prod(shape))).reshape(shape)
    return (ramp + rng.normal(0, 20, shape)).astype(np.float32)


def read_volume(path: Path) -> tuple[np.ndarray, Header]:
    """Read a volume as float32, channels first, axes as stored; raise DataError, naming the file, if that fails."""
    stored, header = read_stored(path)
    return stored.values(stored.array), header
