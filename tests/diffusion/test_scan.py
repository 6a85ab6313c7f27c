"""What MAISI's U-Net takes of a scan: numbers in its units, each volume's own, and words that a command gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from data import DataSplit, VolumeFile
from diffusion.conditioning import (
    ConditionBatch,
    Preparation,
    check_conditions,
    find_partners_of,
    hidden,
    prepare_conditions,
    some_hidden,
)
from diffusion.conditioning.command_line import AskedConditions
from diffusion.conditioning.kind import Asked
from diffusion.conditioning.scan import scan_vector
from runtime.processes import Process
from settings import DataError, Settings, UserError, validate
from settings.conditioning import ScanSettings
from tests.conditional_run import write_cases

ALL = ScanSettings(regions=("chest", "pelvis"), modality=3)


def settings_of(scan: dict[str, Any], **data: Any) -> Settings:
    training = {"adversarial_weight": 0.0}  # the grids are too small for a discriminator
    return validate({"data": data, "autoencoder": {"training": training}, "ldm": {"conditioning": {"scan": scan}}})


def test_regions_come_before_the_spacing_and_all_are_in_hundredths():
    expected = [0, 100, 0, 0, 0, 0, 0, 100, 70, 80, 250]
    assert scan_vector(ALL, (0.7, 0.8, 2.5), {}) == pytest.approx(expected)
    own = ScanSettings(regions="t.csv")
    words = {"top_region": "head", "bottom_region": "abdomen"}
    assert scan_vector(own, (1.0, 1.0, 1.0), words) == [100, 0, 0, 0, 0, 0, 100, 0, 100, 100, 100]
    assert (ALL.width, own.width, ScanSettings(modality=1).width, ScanSettings().width) == (11, 11, 3, 0)


def vectors(settings: Settings, files: list[VolumeFile]) -> torch.Tensor:
    """Return what the U-Net takes of the scans of all volumes."""
    pairs, problems = find_partners_of(settings.ldm.conditioning, settings.data, files)
    assert problems == []
    split = DataSplit(tuple(files), ())
    store = prepare_conditions(pairs, Preparation(settings, split, Process(torch.device("cpu")), None))  # type: ignore[arg-type]
    return store.batch(range(len(files))).parts["scan"]


def files_in(folder: Path) -> list[VolumeFile]:
    return [VolumeFile(path, path.name, None, 1, path.name) for path in sorted((folder / "images").iterdir())]


def test_the_spacing_is_that_of_each_volume_on_the_grid(tmp_path):
    write_cases(tmp_path, 2)
    files = files_in(tmp_path)
    # Files of 1.5 x 2 x 3 mm, turned by a quarter, with 16 x 20 x 14 voxels along the axes of the body.
    settings = settings_of({"modality": 1}, voxel_size=[16, 16, 16])
    torch.testing.assert_close(vectors(settings, files), torch.tensor([[200.0, 150 * 20 / 16, 300 * 14 / 16]] * 2))
    spaced = settings_of({"modality": 1}, spacing=[1.0, 1.0, 1.0], resize="crop_or_pad", voxel_size=[16, 16, 16])
    torch.testing.assert_close(vectors(spaced, files), torch.full((2, 3), 100.0), rtol=0.05, atol=0)


def test_regions_of_a_table_are_read_for_each_volume_and_wrong_words_named(tmp_path):
    write_cases(tmp_path, 2)
    files, table = files_in(tmp_path), tmp_path / "regions.csv"
    table.write_text("file,top_region,bottom_region\ncase_1.nii.gz,head,chest\ncase_0.nii.gz,abdomen,pelvis\n")
    settings = settings_of({"regions": str(table)}, source=str(tmp_path / "images"))
    assert vectors(settings, files)[:, :8].tolist() == [[0, 0, 100, 0, 0, 0, 0, 100], [100, 0, 0, 0, 0, 100, 0, 0]]
    table.write_text("file,top_region,bottom_region\ncase_1.nii.gz,leg,chest\ncase_0.nii.gz,abdomen,pelvis\n")
    with pytest.raises(DataError, match=r"has the region leg; allowed: head, chest, abdomen, pelvis; correct it"):
        check_conditions(settings, DataSplit(tuple(files), (), ()))


def test_a_hidden_modality_is_the_unknown_one_and_the_scan_is_never_hidden():
    s = validate({"ldm": {"conditioning": {"scan": {"modality": 3}, "dropout": 0.5}}}).ldm.conditioning
    condition = ConditionBatch({"modality": torch.full((4,), 3), "scan": torch.arange(12.0).view(4, 3)})
    nothing = hidden(condition, s)
    some = some_hidden(condition, s, lambda purpose: torch.tensor([0.1, 0.6, 0.4, 0.9]))
    assert nothing.parts["modality"].tolist() == [0] * 4
    assert some.parts["modality"].tolist() == [0, 3, 0, 3]
    assert nothing.parts["scan"] is some.parts["scan"] is condition.parts["scan"]
    assert condition.unet_inputs.keys() == {"class_labels", "scan"}


def asked(numbers: list[str], scan: ScanSettings) -> Mapping[str, torch.Tensor]:
    """Return the conditions of two samples that a command asks for."""
    settings = settings_of(scan.model_dump())
    conditions = AskedConditions(Asked(settings, {}), numbers, None)
    return conditions.batch([0, 1], 1, (1.0, 1.0, 2.0)).parts


def test_a_command_may_say_other_regions_and_another_modality():
    found = asked(["modality=1", "bottom_region=head"], ALL)
    assert found["modality"].tolist() == [1, 1]
    assert found["scan"].tolist() == [[0, 100, 0, 0, 100, 0, 0, 0, 100, 100, 200]] * 2
    assert asked([], ALL)["modality"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("numbers", "scan", "text"),
    [
        (["modality=128"], ALL, "--number: modality=128; allowed for modality: 0 to 127"),
        (["top_region=leg"], ALL, "allowed for top_region: head, chest, abdomen, pelvis"),
        (["age=3"], ALL, "--number: age=3, not a number of the run; allowed: modality, top_region, bottom_region"),
        ([], ScanSettings(regions="t.csv"), "top_region is not given, and the run was trained with one"),
    ],
)
def test_words_that_no_scan_has_are_refused(numbers, scan, text):
    with pytest.raises(UserError) as error:
        asked(numbers, scan)
    assert text in str(error.value)
