"""Conditions from the command line: which files make a case, and what may not be left out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.formats import write_nifti
from diffusion.conditioning.class_label import ClassLabel
from diffusion.conditioning.command_line import AskedConditions, _files_of
from diffusion.conditioning.kind import Asked, Case, Sample
from diffusion.conditioning.tabular import NumberCode, Tabular, code_of
from diffusion.normalisation import Normalisation
from settings import DataError, Settings, UserError
from settings.conditioning import ConditioningSettings, TabularSettings
from tests.data.test_dicom import voxels_of, write_series

BOTH = {
    "label_map": {"source": "maps", "num_classes": 3},
    "volume": {"source": "others", "encoding": "resample", "intensity": {"mode": "window", "lower": 0, "upper": 100}},
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for place, name in enumerate("abc"):
        rng = np.random.default_rng(place)
        write_nifti(Path("others") / f"{name}.nii", rng.uniform(0, 100, (1, 16, 16, 16)).astype(np.float32), np.eye(4))
        write_nifti(Path("maps") / f"{name}.nii", rng.integers(0, 3, (1, 16, 16, 16)).astype(np.float32), np.eye(4))
    return tmp_path


def cases(values: dict[str, Any], **files: str) -> list[Case]:
    values = copy.deepcopy(values)
    values["ldm"]["conditioning"] = BOTH
    learned = {"volume": Normalisation.uniform(1)}
    given = {f"--{option}": place for option, place in files.items()}
    return AskedConditions(Asked(Settings.model_validate(values), learned, files=given), (), None).cases


@pytest.mark.parametrize(
    ("own", "others", "alone"), [("label map", "volume", "labels"), ("volume", "label map", "condition")]
)
def test_a_single_file_belongs_to_every_file_of_a_folder(tiny_values, folder, own, others, alone):
    files = {"labels": "maps", "condition": "others"}
    Path("one").mkdir()
    Path(f"{files[alone]}/b.nii").rename("one/elsewhere.nii")
    found = cases(tiny_values, **files | {alone: "one/elsewhere.nii"})
    assert [case.name for case in found] == ["a", "b", "c"]
    assert np.array_equal(found[0].parts[own], found[2].parts[own])
    assert not np.array_equal(found[0].parts[others], found[2].parts[others])


def test_files_of_one_case_must_cover_the_same_space(tiny_values, folder):
    away = np.eye(4)
    away[:3, 3] = 40
    write_nifti(Path("maps/b.nii"), np.zeros((1, 16, 16, 16), np.float32), away)
    with pytest.raises(DataError, match=r"maps/b\.nii: .*, and its volume others/b\.nii .* must cover the same space"):
        cases(tiny_values, labels="maps", condition="others")


def asked_numbers(code: NumberCode, dropout: float = 0.1, **numbers: str) -> list[float]:
    s = ConditioningSettings.model_validate({"dropout": dropout, "tabular": {"table": "t", "continuous": ["age"]}})
    asked = Asked(Settings(), {"tabular": code}, numbers=numbers)
    return Tabular(s).from_command_line(asked, has_cases=False)(Sample(0, ())).tolist()


def test_a_number_that_was_never_hidden_must_be_given():
    code = NumberCode(continuous=(("age", 50.0, 10.0),), categorical=(("sex", ("F", "M")),), max_categories=3)
    assert asked_numbers(code, age="60") == [1, 1, 0, 0, 0]
    with pytest.raises(UserError, match=r"--number: sex not given, .*\(dropout: 0\); add --number sex=VALUE"):
        asked_numbers(code, dropout=0, age="60")
    assert asked_numbers(code, dropout=0, age="60", sex="M") == [1, 1, 0, 1, 0]


def test_a_number_outside_the_trained_range_is_used_with_a_warning(caplog):
    settings = TabularSettings.model_validate({"table": "t.csv", "continuous": ["age"]})
    code = code_of(settings, [{"age": text} for text in ("20", "30", "55", "90")], num_train=3)
    for age in ("20", "55"):
        asked_numbers(code, age=age)
    assert caplog.text == ""
    asked_numbers(code, age="400")
    assert "--number: age=400 is outside what the run was trained on, 20 to 55" in caplog.text


def test_a_class_is_hidden_in_cases_unless_it_was_never_hidden_in_training():
    settings, case = Settings(), Sample(4, (), Case("a", {}, None, ""))  # type: ignore[arg-type]
    for dropout in (0.1, 0.0):
        s = ConditioningSettings.model_validate({"type": "class", "num_classes": 3, "dropout": dropout})
        asked = Asked(settings, {}, ("a", "b", "c"))
        assert ClassLabel(s).from_command_line(asked, has_cases=False)(Sample(4, ())) == 1
        chosen = Asked(settings, {}, ("a", "b", "c"), "b")
        assert ClassLabel(s).from_command_line(chosen, has_cases=True)(case) == 1
    with pytest.raises(UserError, match=r"--class: not given, .* allowed: a, b, c; choose one of them"):
        ClassLabel(s).from_command_line(asked, has_cases=True)
    s = s.model_copy(update={"dropout": 0.1})
    assert ClassLabel(s).from_command_line(asked, has_cases=True)(case) == 3


def test_label_maps_find_their_volumes_by_the_endings_that_training_knows(tiny_values, folder):
    for name in "abc":
        Path(f"maps/{name}.nii").rename(f"maps/{name}_seg.nii")
    expected = cases(tiny_values, labels="maps")
    Path("others/a.nii").rename("others/a_0000.nii")
    found = cases(tiny_values, labels="maps", condition="others")
    assert [case.name for case in found] == ["a_0000", "b", "c"]
    for case, alone in zip(found, expected, strict=True):
        assert np.array_equal(case.parts["label map"], alone.parts["label map"])
    assert [case.name for case in expected] == ["a_seg", "b_seg", "c_seg"]


def test_each_dicom_series_of_a_folder_is_a_volume_and_no_two_have_one_name(tmp_path):
    scans = tmp_path / "scans"
    for name in ("a", "b"):
        write_series(scans / name, voxels_of(0))
    found = _files_of(str(scans), "--condition")
    assert {name: path.parent.name for name, path in found.items()} == {"a": "a", "b": "b"}
    assert _files_of(str(scans / "b"), "--condition").keys() == {"b"}
    # Several of one folder have the names of their first files.
    for series in (1, 2):
        for place, path in enumerate(write_series(scans / "c", voxels_of(0))):
            path.rename(scans / "c" / f"{series}_{place}.dcm")
    assert sorted(_files_of(str(scans), "--condition")) == ["a", "b", "c_1_0.dcm", "c_2_0.dcm"]
    write_nifti(scans / "a.nii.gz", np.zeros((1, 4, 4, 4), np.float32), np.eye(4))
    with pytest.raises(UserError, match="has two volumes named a, but for the ending; rename one"):
        _files_of(str(scans), "--condition")
