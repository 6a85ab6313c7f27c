"""Each test works in a folder of its own, with eight volumes when it asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.formats import write_nifti
from tests.data.small_volumes import AFFINE, random_voxels


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phantoms and remembered checks go to runs/ of the folder a command is run in."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight NIfTI volumes in one folder."""
    for i in range(8):
        write_nifti(tmp_path / "volumes" / f"v{i}.nii.gz", random_voxels(i), AFFINE)
    return tmp_path / "volumes"


@pytest.fixture
def make_volume(tmp_path: Path) -> Callable[..., Path]:
    """Write one NIfTI volume below the folder `volumes` and return its path."""

    def make(name: str, voxels: np.ndarray | None = None, affine: np.ndarray = AFFINE) -> Path:
        path = tmp_path / "volumes" / name
        write_nifti(path, random_voxels(len(name)) if voxels is None else voxels, affine)
        return path

    return make
