"""A tiny conditional run on eight volumes with label maps, for tests that look at one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data.formats import write_nifti
from tests.finished_run import export_autoencoder
from tests.support.tiny_config import TINY

AFFINE = np.array([[0, -2.0, 0, 40], [1.5, 0, 0, -10], [0, 0, 3.0, 5], [0, 0, 0, 1]])
"""Turned by a quarter about the third axis."""


def write_cases(folder: Path, number: int = 8) -> None:
    """Write volumes, whose bright box lies elsewhere in each, and label maps of the same boxes."""
    for place in range(number):
        rng = np.random.default_rng(place)
        corner = rng.integers(1, 9, 3)
        labels = np.zeros((1, 20, 16, 14), np.float32)
        labels[0, corner[0] : corner[0] + 8, corner[1] : corner[1] + 6, 3:11] = 1
        labels[0, corner[0] + 2 : corner[0] + 5, corner[1] : corner[1] + 3, 5:9] = 2
        voxels = 100 + 200 * labels + rng.normal(0, 10, labels.shape)
        write_nifti(folder / "images" / f"case_{place}.nii.gz", voxels.astype(np.float32), AFFINE)
        write_nifti(folder / "maps" / f"case_{place}.nii.gz", labels, AFFINE)


def conditional_config(folder: Path, conditioning: dict[str, Any], **ldm: Any) -> Path:
    """Write the cases, an autoencoder and a config into a folder, which must be the working folder."""
    write_cases(folder)
    values = copy.deepcopy(TINY)
    values["data"] |= {"source": str(folder / "images"), "val_fraction": 0.3}
    values["ldm"] |= {"conditioning": conditioning, **ldm}
    config = folder / "tiny.yaml"
    config.write_text(yaml.safe_dump(values))
    export_autoencoder(values)
    return config


LABEL_MAPS: dict[str, Any] = {"label_map": {"source": "maps", "num_classes": 3}}
