"""Columns of a table as conditions: every problem named, coded by the training volumes, hidden as zeros."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.partners import Row
from data.volumes import VolumeFile
from diffusion.conditioning.tabular import NumberCode, Tabular, code_of
from settings import DataError, DataSettings
from settings.conditioning import ConditioningSettings, TabularSettings


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settings(**values) -> TabularSettings:
    return TabularSettings.model_validate(
        {"table": "people.csv", "continuous": ["Age"], "categorical": ["sex"], **values}
    )


MANY = "e,O,1\nf,P,2\n" + "".join(f"v{n},w{n},1\n" for n in range(17))


def files(*names: str) -> list[VolumeFile]:
    return [VolumeFile(Path(name), name) for name in names]


def read_numbers(s: TabularSettings, files: list[VolumeFile]) -> tuple[list[Row], list[str]]:
    problems: list[str] = []
    kind = Tabular(ConditioningSettings(tabular=s))
    return list(kind.find(files, DataSettings(), problems).rows), problems


def test_values_are_standardised_by_the_training_volumes_and_words_have_places():
    Path("people.csv").write_text("file,sex,age,other\nb.nii,M,70,x\nsub/a.nii,F,50,y\nc.nii,X,1000,z\n")
    s = settings()
    rows, problems = read_numbers(s, files("sub/a.nii", "folder/b.nii", "c.nii"))
    assert problems == []
    code = NumberCode.model_validate_json(code_of(s, rows, 2).model_dump_json())
    assert code.continuous == (("Age", 60.0, 10.0),)
    assert code.encode(rows[0]) == [-1.0, 1.0, 1.0, *[0.0] * 15]
    assert code.encode(rows[1]) == [1.0, 1.0, 0.0, 1.0, *[0.0] * 14]
    assert code.encode({"sex": "X"}) == [0.0, 0.0, 0.0, 0.0, 1.0, *[0.0] * 13]
    assert code.encode({}) == [0.0] * sum(s.embedded_numbers.values())
    with pytest.raises(ValueError, match="sex=Y is none of F, M, X"):
        code.encode({"sex": "Y"})
    with pytest.raises(ValueError, match="Age=old is not a number"):
        code.encode({"Age": "old"})


def test_every_missing_doubled_and_wrong_row_is_named():
    Path("people.csv").write_text("file,sex,age\na,F,5\na,M,6\nb,,7\nc,M,old\nd,N,inf\n" + MANY)
    _, problems = read_numbers(settings(), files(*"abcdefg", *(f"v{n}" for n in range(17))))
    text = "\n".join(problems)
    assert "a: 2 rows in ldm.conditioning.tabular.table: people.csv" in text
    assert "b: sex is empty in " in text
    assert "c: Age is old, which is not a finite number" in text
    assert "d: Age is inf, which is not a finite number" in text
    assert "g: no row in ldm.conditioning.tabular.table: people.csv; each volume needs one; add it\n" in f"{text}\n"
    assert "column sex has 22 different values; allowed: at most 16; merge some of them" in text
    assert len(problems) == 6


def test_a_table_without_the_columns_and_a_row_with_more_fields_are_refused():
    """A decimal comma would cut a number short, or move the columns after it."""
    Path("people.csv").write_text("file,age\na,1\n")
    with pytest.raises(DataError, match="has the columns file, age; file, Age, sex are needed, once each; name"):
        read_numbers(settings(), files("a"))
    Path("people.csv").write_text("file,age\na.nii.gz,63,5\n")
    s = settings(categorical=[], continuous=["age"])
    with pytest.raises(DataError, match=r"tabular\.table: .* line 2 has 3 fields for 2 columns; quote its commas"):
        read_numbers(s, files("a.nii.gz"))
    Path("people.csv").write_text('\ufefffile,age\na.nii.gz,"63.5",,\n')
    assert read_numbers(s, files("a.nii.gz")) == ([{"age": "63.5"}], [])
