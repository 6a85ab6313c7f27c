"""Latents of volumes that exist in name only, for tests of how they are batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import DataSplit, VolumeFile
from diffusion.latents import Latents
from diffusion.normalisation import Normalisation
from settings import DataSettings


def latents_of(read: Callable[[int, int], Tensor], number: int, **more: Any) -> Latents:
    """Return the latents that `read` returns as those of so many training volumes."""
    files = tuple(VolumeFile(Path(f"v{place}.nii"), f"v{place}.nii") for place in range(number))
    facts = ((1.0, 1.0, 1.0), (0.0,), (1.0,), "")
    normalisation = Normalisation.uniform(3)
    return Latents(DataSplit(files, ()), DataSettings(), read, normalisation, torch.zeros(()), *facts, **more)
