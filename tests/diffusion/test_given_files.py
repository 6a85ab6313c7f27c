"""Files and folders that a command is given as conditions."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from data.formats import write_nifti
from diffusion.conditioning.given import _files_of
from settings import UserError
from tests.data.test_dicom import SHAPE, voxels_of, write_series


def test_a_folder_of_dicom_series_gives_one_volume_for_each(tmp_path):
    for name in ("a", "b"):
        write_series(tmp_path / "scans" / name, voxels_of(0))
    found = _files_of(str(tmp_path / "scans"), "--condition")
    assert {name: path.parent.name for name, path in found.items()} == {"a": "a", "b": "b"}
    assert _files_of(str(tmp_path / "scans" / "b"), "--condition").keys() == {"b"}


def test_volumes_of_one_name_in_one_folder_are_refused(tmp_path):
    write_series(tmp_path / "scans" / "a", voxels_of(0))
    write_nifti(tmp_path / "scans" / "c.nii.gz", np.zeros((1, *SHAPE), np.float32), np.eye(4))
    assert _files_of(str(tmp_path / "scans"), "--condition").keys() == {"a", "c"}
    write_nifti(tmp_path / "scans" / "a.nii.gz", np.zeros((1, *SHAPE), np.float32), np.eye(4))
    with pytest.raises(UserError, match="two files of one name"):
        _files_of(str(tmp_path / "scans"), "--condition")


def test_series_whose_first_files_share_a_name_are_told_apart_by_their_folders(tmp_path):
    scans = tmp_path / "scans"
    for folder in (scans / "a", scans / "b"):
        for series in (1, 2):
            for place, path in enumerate(write_series(folder, voxels_of(0))):
                path.rename(folder / f"{series}_{place}.dcm")
    found = _files_of(str(scans), "--condition")
    assert sorted(found) == ["a_1_0.dcm", "a_2_0.dcm", "b_1_0.dcm", "b_2_0.dcm"]
    write_series(scans / "scans", voxels_of(0))
    for path in (scans / "scans").iterdir():
        shutil.copy(path, scans / path.name)
    with pytest.raises(UserError, match="--condition: two DICOM series are named scans; rename the folder"):
        _files_of(str(scans), "--condition")
