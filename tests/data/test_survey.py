"""Labels, patients, frames and unusual volumes are recognised; the suggested grid suits both stages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.spatial import cKDTree

from data import prepare_volumes
from data.checking import PreparedFolder, VolumeFacts, looks_like_labels, measure
from data.discovery import find
from data.formats import write_nifti
from data.loading import load_volume
from data.overview import outlier_lines, range_lines
from data.volumes import check_source, groups_of, split, suspected_patients
from settings import DataError
from tests.data.small_volumes import AFFINE, build_settings, discovered, random_voxels


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["images/a", "labels/a", "images/b"], ["images/a", "images/b"]),
        (["labels/a", "labels/b"], ["labels/a", "labels/b"]),
        (["p1/t1", "p1/t1_seg", "p2/t1-aparc+aseg", "p3/roi"], ["p1/t1", "p3/roi"]),
        (["ill/imagesTr/a", "ill/labelsTr/a"], ["ill/imagesTr/a"]),
    ],
)
def test_label_maps_are_known_by_their_names_unless_there_is_nothing_else(tmp_path, names, left):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.nii").touch()
    assert [volume.name for volume in find(str(tmp_path))[0]] == [f"{name}.nii" for name in left]


def test_label_maps_are_left_out_unless_asked_for_or_alone(tmp_path, caplog):
    for i in range(3):
        write_nifti(tmp_path / f"all/v{i}.nii.gz", random_voxels(i), AFFINE)
        write_nifti(tmp_path / f"maps/m{i}.nii.gz", (random_voxels(i) > 100).astype(np.uint8), AFFINE)
    write_nifti(tmp_path / "all/odd.nii.gz", (random_voxels(7) // 100).clip(0, 3).round(), AFFINE)
    volumes = prepare_volumes(build_settings(source=str(tmp_path / "all")), 0, 1)
    assert len(volumes.train) + len(volumes.val) == 3
    assert "odd.nii.gz: left out, it looks like a label map" in caplog.text
    asked = prepare_volumes(build_settings(source=str(tmp_path / "all"), include_label_maps=True), 0, 1)
    assert len(asked.train) + len(asked.val) == 4
    assert "every volume looks like a label map" not in caplog.text
    alone = prepare_volumes(build_settings(source=str(tmp_path / "maps")), 0, 1)
    assert len(alone.train) + len(alone.val) == 3
    assert "every volume looks like a label map" in caplog.text


def parcels(number: int) -> np.ndarray:
    """An ellipsoid of about `number` regions, as brain atlases have, in a background of zeros."""
    rng = np.random.default_rng(number)
    places = np.stack(np.meshgrid(*(np.arange(n) for n in (30, 36, 32)), indexing="ij"), axis=-1)
    regions = cKDTree(rng.random((number, 3)) * places.shape[:3]).query(places)[1] + 1
    middle = np.array(places.shape[:3]) / 2
    return np.where(np.linalg.norm((places - middle) / middle, axis=-1) < 0.9, regions, 0)[None]


@pytest.mark.parametrize("kind", [np.int16, np.float32])
@pytest.mark.parametrize("number", [2, 140, 400])
def test_label_maps_are_recognised_by_their_regions_however_many_values_they_have(make_volume, number, kind):
    labels = parcels(number).astype(kind)
    for part in (labels, labels[:, 10:20, 12:24, 12:24]):  # with a background, and without
        _, facts = measure(make_volume("map.nii.gz", part), build_settings())
        assert looks_like_labels(facts) or number == 2
        _, facts = measure(make_volume("map.nii.gz", part * np.float32(0.37)), build_settings())
        assert not looks_like_labels(facts)


def test_images_of_whole_numbers_are_not_label_maps(make_volume):
    rng = np.random.default_rng(0)
    smooth = gaussian_filter(rng.normal(0, 1, (1, 30, 36, 32)), 1.5)
    image = np.interp(smooth, (smooth.min(), smooth.max()), (0, 1)) + rng.normal(0, 0.02, smooth.shape)
    images = {
        "12 bits": 4095 * image.clip(0, 1),
        "8 bits": 255 * image.clip(0, 1),
        "32 grey levels": 31 * image.clip(0, 1),
        "background": np.where(image > 0.75, 255 * image, 0).clip(0, 255),
        "clipped": 255 * (4 * image - 1.5).clip(0, 1),
        "counts": rng.poisson(6 * image.clip(0, 1)),
    }
    for name, values in images.items():
        whole = values.round().astype(np.int16)
        whole[:, 0] = 0
        _, facts = measure(make_volume("image.nii.gz", whole), build_settings())
        assert not looks_like_labels(facts), (name, facts.equal_neighbours)


def test_groups_come_from_a_pattern_a_folder_or_a_column(tmp_path):
    volumes = discovered("a/sub-1_x.nii", "a/sub-1_y.nii", "b/sub-2_x.nii")

    def groups(**values: object) -> list[str]:
        result = groups_of(volumes, build_settings(**values))
        assert result is not None
        return [result[item] for item in volumes]

    assert groups(group_by=r"sub-\d+") == ["sub-1", "sub-1", "sub-2"]
    assert groups(group_by=r"sub-(\d+)") == ["1", "1", "2"]
    assert groups(group_by="folder") == ["a", "a", "b"]
    assert groups(group_by="sub-1") == ["sub-1", "sub-1", "b/sub-2_x.nii/"]
    table = tmp_path / "table.csv"
    table.write_text("file,label,patient\na/sub-1_x.nii,0,p\na/sub-1_y.nii,0,p\nsub-2_x.nii,1,q\n")
    assert groups(group_by="column:patient", class_labels=str(table)) == ["p", "p", "q"]
    for values, text in (
        ({"group_by": "nothing"}, "matches 0 of 3 volumes, not a/sub-1_x.nii"),
        ({"group_by": "("}, "is not a pattern"),
        ({"group_by": "a{99999999999999999999}"}, "is not a pattern"),
        ({"group_by": "column:patient"}, "without data.class_labels"),
        ({"group_by": "column:age", "class_labels": str(table)}, "file, age are needed"),
    ):
        with pytest.raises(DataError, match=text):
            groups(**values)
    table.write_text("file,label,patient\na/sub-1_x.nii,0,p\na/sub-1_x.nii,0,q\n")
    with pytest.raises(DataError, match=r"3 problems:\n  a/sub-1_x\.nii: 2 rows in"):
        groups(group_by="column:patient", class_labels=str(table))


@pytest.mark.parametrize("val_fraction", [0.01, 0.3, 0.99])
def test_volumes_of_one_group_stay_together(val_fraction):
    volumes = discovered(*(f"sub-{i // 2:02d}_{i % 2}.nii" for i in range(40)))
    s = build_settings(group_by=r"sub-\d+", val_fraction=val_fraction)
    groups = groups_of(volumes, s)
    assert groups is not None
    train, val = split(volumes, s, 1)
    assert not {groups[item] for item in train} & {groups[item] for item in val}
    assert len(val) / 2 == {0.01: 2, 0.3: 6, 0.99: 19}[val_fraction]
    with pytest.raises(DataError, match=r"data\.group_by: 1 group: .* 40 volumes, 40 to train on and 0 held out"):
        split(volumes, build_settings(group_by="sub"), 1)


def test_patients_with_several_scans_are_suspected_by_names_and_reported_once_without_groups(folder, caplog):
    assert suspected_patients(discovered("patient_1/a.nii", "patient_1/b.nii", "patient_2/a.nii", "v.nii"))
    for names in (["patient_1/a", "patient_1/b"], ["phantom_0001", "phantom_0002"], ["sub-1.nii", "sub-2.nii"]):
        assert suspected_patients(discovered(*names)) is None
    for path in folder.iterdir():
        path.rename(folder / f"sub-{int(path.name[1]) // 2}_{path.name}")
    settings = build_settings(source=str(folder), val_fraction=0.4)
    prepare_volumes(settings, 1, 1)
    assert caplog.text.count("some patients seem to have several scans by their names; data.group_by: 'sub-") == 1
    caplog.clear()
    prepare_volumes(settings.model_copy(update={"group_by": "sub-[0-9]+"}), 1, 1)
    assert "several scans" not in caplog.text


def test_one_volume_of_a_4d_file_can_be_chosen(tmp_path):
    voxels = np.concatenate([random_voxels(i) for i in range(3)])
    write_nifti(tmp_path / "all/four.nii.gz", voxels, AFFINE)
    write_nifti(tmp_path / "all/three.nii.gz", random_voxels(1), AFFINE)
    (problem,) = check_source(build_settings(source=str(tmp_path / "all")), 0, 1).problems
    assert "3 channels (12 x 10 x 8 x 3)" in problem.text
    assert "or set data.frame: 0 to 2 to read one of its volumes" in problem.text
    settings = build_settings(source=str(tmp_path / "all"), frame=1)
    one, other = (load_volume(tmp_path / f"all/{name}.nii.gz", settings, 1).image for name in ("four", "three"))
    assert torch.equal(one, other)
    assert PreparedFolder(settings).folder != PreparedFolder(build_settings()).folder
    with pytest.raises(DataError, match=r"data\.frame is 7, and it holds 3 volumes .* 0 to 2 is allowed"):
        load_volume(tmp_path / "all/four.nii.gz", build_settings(frame=7))


def mr_facts(number: int, make_volume: Callable[..., Path]) -> list[VolumeFacts]:
    """MR crops as sets have them: sizes vary, every fifth volume is of 8 bits, every seventh rings below zero."""
    rng = np.random.default_rng(0)
    _, one = measure(make_volume("one.nii.gz"), build_settings())
    facts = []
    for i in range(number):
        unit = float(rng.lognormal(0, 0.3)) * (100 if i % 5 == 0 else 900)
        shape = (int(rng.integers(30, 44)), int(rng.integers(40, 58)), int(rng.integers(24, 46)))
        low, high = -0.05 * unit if i % 7 == 0 else 0.0, unit * float(rng.uniform(1.1, 3))
        facts.append(replace(one, shape=shape, minimum=low, low=0.01 * unit, high=unit, maximum=high))
    return facts


def test_natural_spread_is_not_unusual_and_what_is_beyond_it_is_named(make_volume):
    facts = mr_facts(60, make_volume)
    names = [f"v{i:02d}" for i in range(60)]
    assert outlier_lines(names, facts, build_settings()) == []
    facts[3] = replace(facts[3], maximum=1e6, high=4e5)
    facts[4] = replace(facts[4], minimum=-1024.0, low=-1000.0, maximum=2000.0)
    facts[5] = replace(facts[5], maximum=2e6)
    facts[6] = replace(facts[6], shape=(30, 40, 200))
    assert re.search(
        r"size along z: 2\d to 200 \(median 3[\d.]+, 90 % from 2\d to 4\d\)",
        "\n".join(range_lines(facts, build_settings())),
    )
    facts[7] = replace(facts[7], has_spacing=False, affine=np.eye(4))
    large, ct, spike, long = outlier_lines(names, facts, build_settings())
    assert large.startswith("v03: largest intensity 1e+06, median ")
    assert "range of intensities 4e+05, median " in large
    assert ct == "v04: looks like CT, most others like MR or another positive modality"
    assert spike.startswith("v05: largest intensity 2e+06, median ")
    assert long.startswith("v06: size along z 200, median ")


def test_a_grid_that_cuts_volumes_is_said_in_one_line(folder, caplog):
    values = {"source": str(folder), "resize": "crop_or_pad"}
    prepare_volumes(build_settings(**values, voxel_size=[12, 16, 8]), 0, 1)
    assert "cuts" not in caplog.text
    prepare_volumes(build_settings(**values, voxel_size=[6, 16, 8]), 0, 1)
    assert caplog.text.count("data.voxel_size 6 x 16 x 8 cuts 8 of 8 volumes, by up to 50% of their voxels") == 1


def test_folders_of_cases_are_no_classes_and_label_maps_do_not_make_them_so(tmp_path):
    for i in range(3):
        for place in (
            f"one/case_{i}/image",
            f"bids/sub-{i}/anat/sub-{i}_T1w",
            f"brats/B_{i}/B_{i}_t1",
            f"brats/B_{i}/B_{i}_t2",
        ):
            write_nifti(tmp_path / f"{place}.nii.gz", random_voxels(i), AFFINE)
        for place in (f"one/case_{i}/truth", f"bids/derivatives/sub-{i}_dseg"):
            write_nifti(tmp_path / f"{place}.nii.gz", (random_voxels(i) > 100).astype(np.uint8), AFFINE)
    for name, number in (("one", 3), ("bids", 3), ("brats", 6)):
        source = check_source(build_settings(source=str(tmp_path / name)), 0, 1)
        assert [item.class_name for item in source.volumes] == [None] * number
