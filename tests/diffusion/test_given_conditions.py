"""Conditions that a command is given: which files make a case, and what may not be left out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.formats import write_nifti
from data.pairs.numbers import NumberCode, code_of
from diffusion.conditioning.given import GivenCondition, GivenFiles, check_class, given_conditions, given_numbers
from diffusion.normalisation import Normalisation
from settings import DataError, Settings, UserError
from settings.conditioning import TabularSettings

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


def cases(values: dict[str, Any], **given: str) -> list[GivenCondition]:
    values = copy.deepcopy(values)
    values["ldm"]["conditioning"] = BOTH
    return given_conditions(Settings.model_validate(values), GivenFiles(**given), None, Normalisation.uniform(1))  # type: ignore[arg-type]


def test_a_single_file_belongs_to_every_file_of_a_folder(tiny_values, folder):
    Path("one").mkdir()
    for option, name in (("labels", "maps"), ("condition", "others")):
        Path(f"{name}/b.nii").rename("one/elsewhere.nii")
        other = {"labels": "others", "condition": "maps"}[option]
        options = {"labels": "condition", "condition": "labels"}
        found = cases(tiny_values, **{option: "one/elsewhere.nii", options[option]: other})
        assert [case.name for case in found] == ["a", "b", "c"]
        own = slice(0, 3) if option == "labels" else slice(3, 4)
        assert np.array_equal(found[0].joined[own], found[2].joined[own])
        assert not np.array_equal(found[0].joined, found[2].joined)
        Path("one/elsewhere.nii").rename(f"{name}/b.nii")


def test_files_of_one_case_must_cover_the_same_space(tiny_values, folder):
    away = np.eye(4)
    away[:3, 3] = 40
    write_nifti(Path("maps/b.nii"), np.zeros((1, 16, 16, 16), np.float32), away)
    with pytest.raises(DataError, match=r"maps/b\.nii: .*, and its volume others/b\.nii .* must cover the same space"):
        cases(tiny_values, labels="maps", condition="others")


def test_a_number_that_was_never_hidden_must_be_given():
    code = NumberCode(continuous=(("age", 50.0, 10.0),), categorical=(("sex", ("F", "M")),), max_categories=3)
    found = given_numbers(["age=60"], code)
    assert found is not None
    assert found.tolist() == [[1, 1, 0, 0, 0]]
    with pytest.raises(UserError, match=r"--number: sex not given, .*\(dropout: 0\); add --number sex=VALUE"):
        given_numbers(["age=60"], code, is_ever_hidden=False)
    assert given_numbers(["age=60", "sex=M"], code, is_ever_hidden=False) is not None


def test_a_number_outside_the_trained_range_is_used_with_a_warning(caplog):
    settings = TabularSettings.model_validate({"table": "t.csv", "continuous": ["age"]})
    code = code_of(settings, [{"age": text} for text in ("20", "30", "55", "90")], num_train=3)
    for age in ("20", "55"):
        assert given_numbers([f"age={age}"], code) is not None
    assert caplog.text == ""
    assert given_numbers(["age=400"], code) is not None
    assert "--number: age=400 is outside what the run was trained on, 20 to 55" in caplog.text


def test_a_class_that_was_never_hidden_must_be_given():
    check_class(None, (), is_ever_hidden=False)
    check_class(None, ("a", "b"), is_ever_hidden=True)
    check_class(0, ("a", "b"), is_ever_hidden=False)
    with pytest.raises(UserError, match=r"--class: not given, .* allowed: a, b; choose one of them"):
        check_class(None, ("a", "b"), is_ever_hidden=False)


def test_label_maps_find_their_volumes_by_the_endings_that_training_knows(tiny_values, folder):
    for name in "abc":
        Path(f"maps/{name}.nii").rename(f"maps/{name}_seg.nii")
    expected = cases(tiny_values, labels="maps")
    Path("others/a.nii").rename("others/a_0000.nii")
    found = cases(tiny_values, labels="maps", condition="others")
    assert [case.name for case in found] == ["a_0000", "b", "c"]
    for case, alone in zip(found, expected, strict=True):
        assert np.array_equal(case.joined[:3], alone.joined[:3])
    assert [case.name for case in expected] == ["a_seg", "b_seg", "c_seg"]
