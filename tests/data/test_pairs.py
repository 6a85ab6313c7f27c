"""Partners of volumes: found by name or CSV, every problem named, and brought to the volume's grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data.checking import measure
from data.formats import write_nifti
from data.geometry import geometry_of, in_planes, mismatch
from data.header import Header
from data.partners import PartnerSource, find_partners
from data.volumes import DataSplit, prepare_volumes
from diffusion.conditioning import check_conditions, find_partners_of
from diffusion.conditioning.kind import Partners
from diffusion.conditioning.label_map import label_problem, label_shares, label_values
from settings import DataError, DataSettings, Settings
from settings.conditioning import ConditioningSettings
from tests.data.small_volumes import AFFINE, build_settings, random_voxels, read_volume


def label_map(seed: int, shape: tuple[int, ...] = (12, 10, 8)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, (1, *shape)).astype(np.float32)


def conditioning(source: str | Path, num_classes: int = 3) -> ConditioningSettings:
    return ConditioningSettings.model_validate({"label_map": {"source": str(source), "num_classes": num_classes}})


def checked(s: ConditioningSettings, data: DataSettings, volumes: DataSplit) -> Partners:
    """Return the label maps of all volumes."""
    settings = Settings()
    settings = settings.model_copy(update={"data": data, "ldm": settings.ldm.model_copy(update={"conditioning": s})})
    return check_conditions(settings, volumes).get("label map", Partners())


def write_maps(folder: Path, names: list[str], affine: np.ndarray = AFFINE) -> None:
    for place, name in enumerate(names):
        write_nifti(folder / name, label_map(place), affine)


def volumes_of(source: Path | str) -> DataSplit:
    return prepare_volumes(build_settings(source=str(source)), 1, 1)


def partner_names(source: str | Path, volumes: DataSplit) -> dict[str, str]:
    pairs = checked(conditioning(source), build_settings(source="volumes"), volumes)
    files = (*volumes.train, *volumes.val)
    return {file.name: partner.path.name for file, partner in zip(files, pairs.files["labels"], strict=True)}


@pytest.mark.parametrize(
    ("name", "form", "place"),
    [
        *(("v{}.nii.gz", form, "maps") for form in ("v{}.nii.gz", "v{}.nii", "v{}_seg.nii.gz")),
        ("case{}_0000.nii.gz", "case{}.nii.gz", "maps"),
        *(("v{}_x.nii.gz", f"v{{}}_{end}.nii.gz", "volumes") for end in ("x_seg", "mask", "dseg", "aparc+aseg")),
    ],
)
def test_partners_have_the_names_of_their_volumes_or_begin_them_and_may_lie_beside_them(tmp_path, name, form, place):
    for number in range(4):
        write_nifti(tmp_path / "volumes" / name.format(number), random_voxels(number), AFFINE)
    write_maps(tmp_path / place, [form.format(number) for number in range(4)])
    found = partner_names(tmp_path / place, volumes_of(tmp_path / "volumes"))
    assert found == {name.format(number): form.format(number) for number in range(4)}


def test_a_csv_pairs_any_names(folder, tmp_path):
    write_maps(tmp_path / "elsewhere", [f"m{place}.nii.gz" for place in range(8)])
    rows = [f"v{place}.nii.gz,elsewhere/m{7 - place}.nii.gz" for place in range(8)]
    (tmp_path / "pairs.csv").write_text("\n".join(["file,label_map", *rows]))
    found = partner_names(tmp_path / "pairs.csv", volumes_of(folder))
    assert found == {f"v{place}.nii.gz": f"m{7 - place}.nii.gz" for place in range(8)}


def test_every_missing_doubled_and_unsuitable_partner_is_named_at_once(folder, tmp_path):
    maps = tmp_path / "maps"
    write_maps(maps, [f"v{place}.nii.gz" for place in range(1, 8)])
    write_nifti(maps / "v1.nii", label_map(1), AFFINE)
    write_nifti(maps / "v2.nii.gz", label_map(1, (12, 10, 20)), AFFINE)
    write_nifti(maps / "v3.nii.gz", label_map(1) - 2, AFFINE)
    write_nifti(maps / "v4.nii.gz", label_map(1) + 0.5, AFFINE)
    (maps / "v5.nii.gz").write_bytes(b"nothing")
    moved = AFFINE.copy()
    moved[0, 3] += 40
    write_nifti(maps / "v6.nii.gz", label_map(1), moved)
    with pytest.raises(DataError) as error:
        partner_names(maps, volumes_of(folder))
    text = str(error.value)
    assert "ldm.conditioning: 7 problems with the volumes' partners:" in text
    assert "v0.nii.gz: no partner in ldm.conditioning.label_map.source: " in text
    assert "v1.nii.gz: 2 partners in " in text
    assert "v2.nii.gz: 12 x 10 x 20 voxels of 2 x 2.5 x 3 mm from (-11.0, -13.2, 3.5), and its volume" in text
    assert "v3.nii.gz: label values from -2 to 0; 0 to 2 is allowed by ldm.conditioning.label_map.num_classes" in text
    assert "v4.nii.gz: values that are not whole numbers" in text
    assert "v5.nii.gz: cannot be read as .nii.gz" in text
    assert "v6.nii.gz: 12 x 10 x 8 voxels" in text


def test_one_map_for_two_volumes_is_refused(tmp_path):
    for place in ("a", "b", "c"):
        write_nifti(tmp_path / "volumes" / place / "x.nii.gz", random_voxels(ord(place)), AFFINE)
    write_maps(tmp_path / "maps", ["x.nii.gz"])
    volumes = volumes_of(tmp_path / "volumes")
    files = (*volumes.train, *volumes.val)
    _, problems = find_partners_of(conditioning(tmp_path / "maps"), build_settings(), files)
    assert len(problems) == 3
    assert "has the name of 3 volumes; each needs its own" in problems[0]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("nowhere", "is neither a folder nor a CSV file"),
        ("empty", "holds no volume"),
        ("wrong.csv", "has the columns file, map; file, label_map are needed"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(folder, tmp_path, source, text):
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong.csv").write_text("file,map\n")
    with pytest.raises(DataError, match=text):
        partner_names(source, volumes_of(folder))


@pytest.mark.parametrize("resize", ["resample", "crop_or_pad"])
@pytest.mark.parametrize("grid", [(12, 10, 8), (16, 8, 8)])
def test_a_label_map_takes_the_way_of_its_volume(tmp_path, resize, grid):
    turned = np.array([[0, -2.5, 0, 4], [2.0, 0, 0, -10], [0, 0, 3.0, 5], [0, 0, 0, 1]])
    write_nifti(tmp_path / "map.nii.gz", label_map(5), turned)
    s = build_settings(voxel_size=list(grid), resize=resize)
    coarse = [axis // 2 for axis in grid]
    found = label_shares(tmp_path / "map.nii.gz", 3, s, coarse)
    assert found.shape == (3, *coarse)
    np.testing.assert_allclose(found.sum(dim=0), 1, atol=1e-6)

    voxels, header = read_volume(tmp_path / "map.nii.gz")
    geometry = geometry_of(header, s)
    for value in (1, 2):
        # As an image in the network's range, whose lower end is what padding gets.
        image = geometry.oriented(2 * (voxels == value).astype(np.float32) - 1)
        whole = geometry.to_network_grid(1, in_planes(image))[0] / 2 + 0.5
        blocks = whole.reshape(coarse[0], 2, coarse[1], 2, coarse[2], 2).mean(axis=(1, 3, 5))
        np.testing.assert_allclose(found[value], blocks, atol=1e-6)
    assert found[1:].std() > 0.05
    # A ControlNet gets the value with the largest share.
    values, shares = label_values(tmp_path / "map.nii.gz", s), label_shares(tmp_path / "map.nii.gz", 3, s, grid)
    first, second, _ = shares.sort(dim=0, descending=True).values
    is_clear = first - second > 1e-5
    assert torch.equal(values[is_clear], shares.argmax(dim=0)[is_clear].float())
    assert is_clear.float().mean() > 0.5
    assert set(values.unique().tolist()) == {0, 1, 2}


def header_of(affine: np.ndarray, shape: tuple[int, int, int] = (12, 10, 8), has_spacing: bool = True) -> Header:
    return Header(shape, shape, 1, affine, "<f4", has_spacing)


def turned_about_the_diagonal(degrees: float) -> np.ndarray:
    axis, angle = np.ones(3) / np.sqrt(3), np.deg2rad(degrees)
    cross = np.cross(np.eye(3), axis)
    affine = np.eye(4)
    affine[:3, :3] += np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    affine[:3, 3] = affine[:3, :3] @ np.full(3, -31.5)
    return affine


def test_a_turned_partner_is_refused_even_if_two_of_its_corners_stay():
    volume, partner = (header_of(turned_about_the_diagonal(degrees), (64, 64, 64)) for degrees in (0, 30))
    s = build_settings()
    assert mismatch("volume", volume, "volume", volume, s) is None
    assert "both must cover the same space" in (mismatch("partner", partner, "volume", volume, s) or "")


def test_a_partner_on_another_grid_is_refused_if_voxels_are_cropped_as_they_are():
    """Its middle voxels cover another space than those of the volume."""
    volume, partner = header_of(np.eye(4), (24, 20, 16)), header_of(np.diag([2.0, 2, 2, 1]), (12, 10, 8))
    partner.affine[:3, 3] = 0.5
    for values in ({}, {"spacing": [1.5, 2, 3], "resize": "crop_or_pad"}):
        assert mismatch("partner", partner, "volume", volume, build_settings(**values)) is None
    s = build_settings(resize="crop_or_pad")
    assert "crop_or_pad needs both on one grid; set data.spacing" in (
        mismatch("partner", partner, "volume", volume, s) or ""
    )
    turned = header_of(np.array([[0, 1.0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]), (20, 24, 16))
    assert mismatch("turned", turned, "volume", volume, s) is None


def test_an_array_without_orientation_is_no_partner_of_a_volume_that_would_be_turned():
    array, ras, lps = header_of(np.eye(4), has_spacing=False), header_of(AFFINE), header_of(np.diag([-1, -1, 1, 1.0]))
    s, spaced = build_settings(), build_settings(spacing=[1, 1, 1])
    assert mismatch("array", array, "volume", ras, s) is None
    assert mismatch("array", array, "volume", array, spaced) is None
    for partner, volume in ((array, lps), (lps, array)):
        assert "one of them would be turned" in (mismatch("partner", partner, "volume", volume, s) or "")
    assert "data.spacing is set" in (mismatch("array", array, "volume", ras, spaced) or "")


def test_half_a_voxel_rounds_alike_in_single_and_double_precision():
    s = build_settings(spacing=[1.4, 1.4, 1.4], resize="crop_or_pad")
    shapes = {
        geometry_of(header_of(np.diag([mm, mm, mm, 1.0]), (351, 5, 7)), s).spaced_shape
        for mm in (0.7, float(np.float32(0.7)), 0.7 + 1e-8)
    }
    assert len(shapes) == 1


def test_a_partner_outside_its_window_is_refused_with_the_name_of_the_window(folder, tmp_path):
    volumes = volumes_of(folder)
    for place in range(8):
        write_nifti(tmp_path / "others" / f"v{place}.nii.gz", random_voxels(place), AFFINE)
    window = {"mode": "window", "lower": 5000, "upper": 6000}
    volume = {"encoding": "resample", "source": str(tmp_path / "others"), "intensity": window}
    s = ConditioningSettings.model_validate({"volume": volume})
    text = r"(?s)8 problems.*lie outside the window 5000 to 6000.*change ldm\.conditioning\.volume\.intensity"
    with pytest.raises(DataError, match=text):
        checked(s, build_settings(source=str(folder)), volumes)


def test_a_map_may_have_many_values_of_any_type_if_they_are_whole(tmp_path):
    values = 500 * np.random.default_rng(0).random((1, 12, 10, 8)).astype(np.float32)
    texts = []
    for name, voxels in (("a", values), ("b", values.round())):
        write_nifti(tmp_path / f"{name}.nii.gz", voxels, AFFINE)
        _, facts = measure(tmp_path / f"{name}.nii.gz", build_settings())
        texts += [label_problem(tmp_path / f"{name}.nii.gz", facts, number) for number in (501, 300)]
    assert "a.nii.gz: values that are not whole numbers" in str(texts[0])
    assert texts[2] is None
    assert "b.nii.gz: label values from 0 to 500; 0 to 299 is allowed by" in str(texts[3])


def test_a_volume_is_never_its_own_partner(folder):
    volumes = volumes_of(folder)
    problems: list[str] = []
    place = PartnerSource(str(folder), "ldm.conditioning.volume.source", "volume")
    assert not find_partners(place, volumes.train, problems)
    assert len(problems) == len(volumes.train)
    assert all("no partner in ldm.conditioning.volume.source" in line for line in problems)
