"""Partners in the folder of their volumes, and volumes without any."""

from __future__ import annotations

import pytest

from data.formats import write_nifti
from data.partners import PartnerSource, find_partners
from diffusion.conditioning import store
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
    problems: list[str] = []
    place = PartnerSource(str(folder), "ldm.conditioning.volume.source", "volume")
    assert not find_partners(place, volumes.train, build_settings(), problems)
    assert len(problems) == len(volumes.train)
    assert all("no partner in ldm.conditioning.volume.source" in line for line in problems)
    assert all(line.endswith("add it, list the pairs in a CSV file, or remove the volume") for line in problems)


def test_of_many_problems_the_first_ten_are_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST_LINES", 3)
    write_maps(tmp_path / "maps", ["other.nii.gz"])
    with pytest.raises(DataError) as error:
        partner_names(tmp_path / "maps", volumes_of(folder))
    assert str(error.value).count("no partner in ") == 3
    assert str(error.value).endswith("\n  and 5 more")
