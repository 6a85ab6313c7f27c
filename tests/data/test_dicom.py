"""A DICOM series equals the same volume as NIfTI; what is wrong with a series is said, and hides no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import torch
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import UID, ExplicitVRLittleEndian, JPEGLosslessSV1, generate_uid

from data.discovery import find
from data.formats import content_digest, read_header, read_stored, signature, write_nifti
from data.loading import load_volume
from data.volumes import check_source
from settings import DataError
from tests.data.small_volumes import build_settings, read_volume

CT = UID("1.2.840.10008.5.1.4.1.1.2")
SHAPE = (12, 10, 8)
INTERCEPT = -1024


def voxels_of(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.integers(-1000, 2000, SHAPE) // 2 + np.arange(8) * 20).astype(np.int16)


def write_series(folder: Path, voxels: np.ndarray, **changes: Any) -> list[Path]:
    """Write one file per slice, in an order of names that is not that of positions; return them by position."""
    folder.mkdir(parents=True, exist_ok=True)
    series = generate_uid()
    paths = []
    for k in range(voxels.shape[2]):
        file = pydicom.Dataset()
        file.file_meta = FileMetaDataset()
        file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        file.file_meta.MediaStorageSOPClassUID = CT
        file.file_meta.MediaStorageSOPInstanceUID = generate_uid()
        file.SOPClassUID, file.SOPInstanceUID, file.SeriesInstanceUID = CT, generate_uid(), series
        file.Modality, file.ImageType = "CT", ["ORIGINAL", "PRIMARY", "AXIAL"]
        file.Columns, file.Rows = voxels.shape[:2]
        file.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        file.ImagePositionPatient = [-10, -20, 5 + 3 * k]
        file.PixelSpacing = [2.5, 2.0]
        file.RescaleSlope, file.RescaleIntercept = 1, INTERCEPT
        file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
        file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 16, 15, 0
        file.PixelData = (voxels[:, :, k].T.astype(np.int32) - INTERCEPT).astype(np.uint16).tobytes()
        for name, value in changes.items():
            setattr(file, name, value(k) if callable(value) else value)
        paths.append(folder / f"{(k * 5) % voxels.shape[2]:02d}_{series[-6:]}.dcm")
        file.save_as(paths[-1], enforce_file_format=True)
    return paths


def as_nifti(path: Path, voxels: np.ndarray) -> Path:
    affine = np.diag([-2.0, -2.5, 3.0, 1.0])
    affine[:3, 3] = [10, 20, 5]
    write_nifti(path, voxels[None], affine)
    return path


@pytest.mark.parametrize("values", [{}, {"spacing": [1.5, 1.5, 2.0]}])
def test_series_equals_the_same_volume_as_nifti(tmp_path, values):
    voxels = voxels_of(0)
    write_series(tmp_path / "scan", voxels)
    settings = build_settings(**values)
    (found,) = find(str(tmp_path / "scan"))[0]
    ours, theirs = load_volume(found.path, settings), load_volume(as_nifti(tmp_path / "v.nii.gz", voxels), settings)
    assert torch.equal(ours.image, theirs.image)
    np.testing.assert_allclose(ours.geometry.affine, theirs.geometry.affine, atol=1e-6)


def test_good_series_is_found_beside_broken_ones_and_each_of_them_is_named(tmp_path):
    good, broken = voxels_of(0), voxels_of(1)
    write_series(tmp_path / "all/a", good)
    write_series(tmp_path / "all/b", broken)[3].unlink()
    write_series(tmp_path / "all/c", broken[:, :, :2], ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])
    source = check_source(build_settings(source=str(tmp_path / "all")), 0, 1)
    assert [item.name for item in source.volumes] == ["a", "b"]
    assert [bool(item.problems) for item in source.checked] == [False, True]
    assert "are 6 mm apart, other slices 3 mm; equal distances are needed" in source.problems[0].text
    assert any(note.name.startswith("c/") and "a localizer (2 images)" in note.text for note in source.left_out)


def test_two_series_in_one_folder_are_two_volumes_with_a_localizer_left_out_of_one(tmp_path):
    one, two = voxels_of(0), voxels_of(1)
    write_series(tmp_path / "scan", one)
    kinds = [["ORIGINAL", "PRIMARY", "AXIAL"], ["ORIGINAL", "PRIMARY", "LOCALIZER"]]
    turned = {"ImageOrientationPatient": lambda k: [0, 1, 0, 0, 0, -1] if k == 0 else [1, 0, 0, 0, 1, 0]}
    write_series(tmp_path / "scan", two, ImageType=lambda k: kinds[k == 0], **turned)
    found, left_out = find(str(tmp_path / "scan"))
    assert sorted(read_header(item.path).shape for item in found) == [(12, 10, 7), (12, 10, 8)]
    assert ["a localizer (1 image)" in note.text for note in left_out] == [True]
    assert check_source(build_settings(source=str(tmp_path / "scan")), 0, 1).problems == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ImagePositionPatient": lambda k: [-10, -20, 5 + 3 * max(k, 1)]}, "are 0 mm apart"),
        ({"ImagePositionPatient": lambda k: [-10, -20, 5 + 3 * k + 0.7 * (k == 3)]}, "are 3.7 mm apart"),
        ({"ImagePositionPatient": lambda k: [-10, -20 + k, 5 + 3 * k]}, "are 18 degrees from being perpendicular"),
        ({"ImageOrientationPatient": lambda k: [1, 0, 0, 0, 1, 0] if k else [0, 1, 0, 0, 0, 1]}, "ImageOrientation"),
        ({"PixelSpacing": lambda k: [2.5, 2.0 + (k == 2)]}, "PixelSpacing .* of the same series has"),
        ({"PixelSpacing": [-2.5, 2.0]}, r"has PixelSpacing \[-2.5, 2(\.0)?\]; numbers above 0 are needed"),
        # A slice is missing from three, and one of three is doubled.
        ({"ImagePositionPatient": lambda k: [-10, -20, 3 * (k + (k > 0))], "number": 3}, "are 6 mm apart"),
        ({"ImagePositionPatient": lambda k: [0, 0, 3 * min(k, 1)], "number": 3}, "mm apart, other slices 0 mm"),
        ({"RescaleSlope": 0}, "has RescaleSlope 0"),
        ({"NumberOfFrames": 3}, "NumberOfFrames 3; one image of single intensities per file is read"),
        ({"SamplesPerPixel": 3}, "SamplesPerPixel 3; one image"),
    ],
)
def test_what_is_wrong_with_a_series_is_reported(tmp_path, changes, text):
    number = changes.pop("number", 8)
    write_series(tmp_path / "scan", voxels_of(0)[:, :, :number], **changes)
    with pytest.raises(DataError, match=text):
        read_volume(find(str(tmp_path / "scan"))[0][0].path)


def read_series(folder: Path) -> np.ndarray:
    (found,) = find(str(folder))[0]
    return read_volume(found.path)[0][0]


@pytest.mark.parametrize("values", [(-2000,), (-2000, -1990)])
def test_padding_becomes_the_lowest_value_of_the_image(tmp_path, values):
    voxels = voxels_of(0)
    padded = voxels.copy()
    padded[:3], padded[3, 0, 0] = -2000, values[-1] if len(values) > 1 else -2000
    tags = dict(zip(("PixelPaddingValue", "PixelPaddingRangeLimit"), values, strict=False))
    # Signed, as the pixels of most CT scanners are.
    tags |= {"PixelRepresentation": 1, "RescaleIntercept": 0}
    write_series(tmp_path / "scan", padded, PixelData=lambda k: padded[:, :, k].T.astype("<i2").tobytes(), **tags)
    is_image = np.ones(SHAPE, bool)
    is_image[:3] = is_image[3, 0, 0] = False
    expected = np.where(is_image, voxels, voxels[is_image].min())
    np.testing.assert_array_equal(read_series(tmp_path / "scan"), expected)


def test_low_pixels_of_monochrome1_are_bright_unless_they_are_hounsfield_units(tmp_path):
    voxels = voxels_of(0)
    for modality in ("MR", "CT"):
        tags = {"Modality": modality, "PhotometricInterpretation": "MONOCHROME1", "BitsStored": 12, "HighBit": 11}
        write_series(tmp_path / modality, voxels, **tags)
    np.testing.assert_array_equal(read_series(tmp_path / "CT"), voxels)
    np.testing.assert_array_equal(read_series(tmp_path / "MR"), 4095 - (voxels - INTERCEPT) + INTERCEPT)


def test_scales_that_leave_the_stored_type_do_not_wrap(tmp_path):
    voxels = voxels_of(0)
    write_series(tmp_path / "same", voxels, RescaleSlope=40, RescaleIntercept=-30000)
    write_series(tmp_path / "other", voxels, RescaleSlope=lambda k: 40 + k, RescaleIntercept=0)
    stored = voxels.astype(np.float64) - INTERCEPT
    np.testing.assert_array_equal(read_series(tmp_path / "same"), (stored * 40 - 30000).astype(np.float32))
    np.testing.assert_array_equal(read_series(tmp_path / "other"), (stored * (40 + np.arange(8))).astype(np.float32))


@pytest.mark.parametrize(
    ("place", "damage"),
    [
        *((place, lambda content, size=size: content[:size]) for place, size in ((0, 0), (3, 100), (7, 600))),
        # The length of the first element, a whole number of four bytes.
        (3, lambda content: content[:138] + (870).to_bytes(2, "little") + content[140:]),
    ],
)
def test_a_damaged_slice_is_noticed_wherever_it_is(tmp_path, place, damage):
    path = write_series(tmp_path / "scan", voxels_of(0))[place]
    path.write_bytes(damage(path.read_bytes()))
    (checked,) = check_source(build_settings(source=str(tmp_path / "scan")), 0, 1).checked
    assert path.name in str(checked.problems[0])


def test_content_follows_the_slices_and_not_their_names(tmp_path):
    paths = write_series(tmp_path / "scan", voxels_of(0))
    first = find(str(tmp_path / "scan"))[0][0].path
    digest, before = content_digest(first), signature(first)
    paths[2].rename(tmp_path / "scan/zz.dcm")
    assert content_digest(first) == digest
    other = write_series(tmp_path / "other", voxels_of(1))[4]
    file = pydicom.dcmread(tmp_path / "scan/zz.dcm")
    file.PixelData = pydicom.dcmread(other).PixelData
    file.save_as(tmp_path / "scan/zz.dcm")
    assert content_digest(first) != digest
    assert signature(first) != before


def test_files_without_a_suffix_are_recognised(tmp_path):
    for path in write_series(tmp_path / "scan", voxels_of(0)):
        path.rename(path.with_name(f"IM{path.name[:2]}"))
    (tmp_path / "scan/notes").write_text("not an image")
    (found,) = find(str(tmp_path / "scan"))[0]
    assert read_volume(found.path)[0].shape == (1, *SHAPE)


@pytest.mark.parametrize(
    "changes",
    [
        {"PixelSpacing": lambda k: [0.7035 + 1e-7 * (-1) ** k, 0.7035]},
        {"ImageOrientationPatient": lambda k: [1, 5e-4 + 1e-6 * (-1) ** k, 0, -5e-4, 1, 0]},
        {"ImagePositionPatient": lambda k: [-10, -20, round(5 + 3 * k + 0.01 * (-1) ** k, 4)]},
    ],
)
def test_numbers_that_a_scanner_rounded_are_one_volume(tmp_path, changes):
    write_series(tmp_path / "scan", voxels_of(0), **changes)
    (found,) = find(str(tmp_path / "scan"))[0]
    assert read_header(found.path).shape == SHAPE


def test_a_series_in_several_folders_is_named_and_a_copy_of_one_is_allowed(tmp_path):
    (tmp_path / "all/b").mkdir(parents=True)
    for path in write_series(tmp_path / "all/a", voxels_of(0))[::2]:
        path.rename(tmp_path / "all/b" / path.name)
    write_series(tmp_path / "all/c", voxels_of(1))
    shutil.copytree(tmp_path / "all/c", tmp_path / "all/d")
    source = check_source(build_settings(source=str(tmp_path / "all")), 0, 1)
    problems = {item.name: result.problems for item, result in zip(source.volumes, source.checked, strict=True)}
    assert (
        "4 slices of a series that goes on in b; the slices of a volume must be in one folder" in problems["a"][0].text
    )
    assert "4 slices of a series that goes on in a;" in problems["b"][0].text
    assert problems["c"] == problems["d"] == ()


def test_a_link_to_a_slice_that_is_gone_is_named(tmp_path):
    last = write_series(tmp_path / "scan", voxels_of(0))[-1]
    last.rename(tmp_path / "elsewhere.dcm")
    last.symlink_to(tmp_path / "elsewhere.dcm")
    settings = build_settings(source=str(tmp_path / "scan"))
    assert check_source(settings, 0, 1).problems == []
    (tmp_path / "elsewhere.dcm").unlink()
    (problem,) = check_source(settings, 0, 1).problems
    assert f"{last.name} beside it cannot be read as DICOM" in problem.text


def test_a_compression_without_decoder_is_named_and_nothing_is_logged(tmp_path, caplog):
    for path in write_series(tmp_path / "scan", voxels_of(0)):
        file = pydicom.dcmread(path)
        file.PixelData = encapsulate([b"\xff\xd8\xff\xd9"])
        file["PixelData"].is_undefined_length = True
        file.file_meta.TransferSyntaxUID = JPEGLosslessSV1
        file.save_as(path)
    with pytest.raises(DataError, match=r"pip install python-gdcm decodes its JPEG Lossless"):
        read_stored(find(str(tmp_path / "scan"))[0][0].path)
    assert caplog.text == ""
