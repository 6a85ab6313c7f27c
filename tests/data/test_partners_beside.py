"""Partners in the folder of their volumes, and volumes without any."""

from __future__ import annotations

import pytest

from data.formats import write_nifti
from data.pairs.partners import find_partners
from settings import DataError
from tests.data.small_volumes import AFFINE, build_settings, random_voxels
from tests.data.test_pairs import partner_names, volumes_of, write_maps


@pytest.mark.parametrize("form", ["v{}_x_seg.nii.gz", "v{}_mask.nii.gz", "v{}_dseg.nii.gz", "v{}_aparc+aseg.nii.gz"])
def test_partners_beside_their_volumes_have_the_same_name_or_begin_it(tmp_path, form):
    for place in range(4):
        write_nifti(tmp_path / f"v{place}_x.nii.gz", random_voxels(place), AFFINE)
    write_maps(tmp_path, [form.format(place) for place in range(4)])
    found = partner_names(tmp_path, volumes_of(tmp_path))
    assert found == {f"v{place}_x.nii.gz": form.format(place) for place in range(4)}


def test_a_volume_is_never_its_own_partner(folder):
    volumes = volumes_of(folder)
    partners, problems = find_partners(str(folder), volumes.train, build_settings(), "ldm.conditioning.volume")
    assert not partners
    assert all("no partner in ldm.conditioning.volume.source" in line for line in problems)
    assert all(line.endswith("add it, list the pairs in a CSV file, or remove the volume") for line in problems)


def test_many_volumes_with_the_same_problem_share_a_line(folder, tmp_path):
    write_maps(tmp_path / "maps", ["other.nii.gz"])
    with pytest.raises(DataError) as error:
        partner_names(tmp_path / "maps", volumes_of(folder))
    assert "v0.nii.gz, v1.nii.gz and 6 more: no partner in " in str(error.value)
