"""Patches of real brains: the MNI152 templates that nilearn ships, each bent by a seeded smooth deformation."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from settings import UserError

SPACING_MM = 2
BEND_MM = 6.0


@cache
def _templates() -> tuple[np.ndarray, ...]:
    try:
        from nilearn import datasets
    except ImportError:
        raise UserError(
            "nilearn: not installed; it holds the real volumes; pip install -r requirements-dev.txt"
        ) from None
    readers = (datasets.load_mni152_template, datasets.load_mni152_gm_template, datasets.load_mni152_wm_template)
    return tuple(np.asarray(read(resolution=SPACING_MM).get_fdata(), dtype=np.float32) for read in readers)


def patches(number: int, size: int, seed: int) -> Tensor:
    """Return `number` patches (N, 1, size, size, size) in [-1, 1]: T1, grey and white matter in turn."""
    rng = np.random.default_rng(seed)
    return torch.stack([_patch(_templates()[index % 3], size, rng) for index in range(number)])


def _patch(template: np.ndarray, size: int, rng: np.random.Generator) -> Tensor:
    """Cut around a point inside the head, along axes bent by a smooth random field."""
    inside = np.argwhere(template > template.mean())
    centre = inside[rng.integers(len(inside))]
    places = np.stack(np.meshgrid(*[np.arange(size) - size / 2] * 3, indexing="ij")) + centre[:, None, None, None]
    field = np.stack([ndimage.gaussian_filter(rng.standard_normal((size,) * 3), size / 8) for _ in range(3)])
    places = places + field / np.abs(field).max() * (BEND_MM / SPACING_MM)
    values = ndimage.map_coordinates(template, places, order=1, mode="nearest")
    low, high = np.percentile(template, 0.5), np.percentile(template, 99.5)
    unit = np.clip((values - low) / (high - low), 0, 1)
    return torch.from_numpy(unit[None].astype(np.float32) * 2 - 1)
