"""Volumes are found in folders and dataset.json, with their classes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.discovery import chosen, class_names_of, find, mixed_modalities, with_folders
from data.partners import rows_of
from data.volumes import prepare_volumes
from settings import DataError
from tests.data.small_volumes import build_settings, discovered


def write_listing(folder: Path, training: object, **more: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({"training": training, **more}))
    return str(folder / "dataset.json")


def test_a_folder_is_searched_with_its_subfolders_in_the_order_of_names(make_volume, tmp_path):
    for name in ("b/2.nii.gz", "a/1.nii", "a/deep/3.nii.gz", "a/.hidden.nii.gz", "a/._1.nii"):
        make_volume(name)
    (tmp_path / "volumes/notes.txt").write_text("not a volume")
    found = find(str(tmp_path / "volumes"))[0]
    assert [item.name for item in found] == ["a/1.nii", "a/deep/3.nii.gz", "b/2.nii.gz"]
    assert [item.class_name for item in with_folders(found)] == ["a", "a", "b"]


def test_what_runs_wrote_is_left_out_unless_it_is_asked_for(make_volume, tmp_path):
    make_volume("a.nii.gz")
    make_volume("b.nii.gz")
    shutil.copytree(tmp_path / "volumes", tmp_path / "runs/one/samples")
    volumes, (line,) = find(str(tmp_path))
    assert [item.name for item in volumes] == ["volumes/a.nii.gz", "volumes/b.nii.gz"]
    assert str(line) == "runs: left out, it holds what runs wrote"
    assert len(find("runs/one")[0]) == len(find("runs")[0]) == 2
    assert find(str(tmp_path / "volumes"))[1] == []


def test_linked_folders_are_followed_once(make_volume, tmp_path):
    make_volume("a/1.nii.gz").parent.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(tmp_path / "volumes")
    (tmp_path / "volumes/linked").symlink_to(tmp_path / "elsewhere")
    assert [item.name for item in find(str(tmp_path / "volumes"))[0]] == ["linked/1.nii.gz"]


def test_dataset_json_lists_images_and_not_segmentations(make_volume, tmp_path):
    for name in ("imagesTr/a.nii.gz", "imagesTr/b.nii.gz", "labelsTr/a.nii.gz", "imagesTs/c.nii.gz"):
        make_volume(name)
    entries = [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}, "imagesTr/b.nii.gz"]
    source = write_listing(tmp_path / "volumes", entries, test=["./imagesTs/c.nii.gz"])
    by_file = find(source)[0]
    assert [item.name for item in by_file] == ["imagesTr/a.nii.gz", "imagesTr/b.nii.gz"]
    assert [item.class_name for item in by_file] == [None, None]
    assert find(str(tmp_path / "volumes"))[0] == by_file


def test_dataset_json_gives_classes_and_the_split(make_volume, tmp_path):
    for name in "abcde":
        make_volume(f"{name}.nii.gz")
    training = [{"image": f"{name}.nii.gz", "label": label} for name, label in (("a", 10), ("b", 2), ("c", 10))]
    validation = [{"image": f"{name}.nii.gz", "class": "2"} for name in "de"]
    source = write_listing(tmp_path / "volumes", training, validation=validation)
    volumes = prepare_volumes(build_settings(source=source), seed=0, in_channels=1)
    assert volumes.class_names == ("2", "10")
    assert [(file.name, file.label) for file in volumes.train] == [("a.nii.gz", 1), ("b.nii.gz", 0), ("c.nii.gz", 1)]
    assert [(file.name, file.label) for file in volumes.val] == [("d.nii.gz", 0), ("e.nii.gz", 0)]


def test_labels_of_dataset_json_may_be_numbers_names_or_missing(tmp_path):
    entries = [{"image": "a.nii.gz", "label": 0}, {"image": "b.nii.gz", "label": "well"}, {"image": "c.nii.gz"}]
    volumes, (line,) = find(write_listing(tmp_path / "volumes", entries))
    assert [item.class_name for item in volumes] == ["0", "well", None]
    assert str(line).endswith("dataset.json: classes left out, 1 of 3 volumes have none, for example c.nii.gz")


def test_paths_of_dataset_json_stay_inside_its_folder_but_links_may_lead_out(make_volume, tmp_path):
    inside = make_volume("a.nii.gz")
    outside = tmp_path / "outside.nii.gz"
    outside.write_bytes(inside.read_bytes())
    (tmp_path / "volumes/link.nii.gz").symlink_to(outside)
    entries = ["a.nii.gz", "link.nii.gz", "../outside.nii.gz", str(outside), "x/../../outside.nii.gz"]
    source = write_listing(tmp_path / "volumes", entries)
    with pytest.raises(DataError) as refusal:
        find(source)[0]
    text = str(refusal.value)
    assert "3 problems" in text
    assert "../outside.nii.gz leads out of" in text
    assert "put a link to it there" in text
    source = write_listing(tmp_path / "volumes", entries[:2])
    assert len(find(source)[0]) == 2


@pytest.mark.parametrize(
    ("content", "text"),
    [
        *((content, "the file: ") for content in ("{", '{"training": ["\\ud800.nii.gz"]}', "[" * 100_000, "[]")),
        ("{}", "training: Field required"),
        *((f'{{"training": {value}}}', "training: Input should be a valid array") for value in ("{}", '"a.nii.gz"')),
        ('{"training": [], "validation": ["a.nii.gz"]}', "training: List should have at least 1 item"),
        ('{"training": [{"label": 1}]}', "training.0.image: Field required"),
        ('{"training": [NaN, true, [], 3]}', "training.3: "),
        ('{"training": [{"image": "a.nii.gz", "class": 1.5}]}', "training.0.class: Input should be a valid"),
        *(
            (f'{{"training": [{{"image": "a.nii", "label": {label}}}]}}', "0.label: ")
            for label in ("1.5", "true", '""')
        ),
        ('{"training": [{"image": "\\u0000"}]}', "training.0.image: String should match"),
        ('{"training": [{"image": "a.nii", "label": ' + "1" * 5000 + "}]}", "dataset.json: "),
        ('{"training": [{"image": ["a.nii", "b.nii"]}]}', "training.0.image: Input should be a valid string"),
        ('{"training": ["a.nii.gz", "./a.nii.gz"]}', "a.nii.gz: listed more than once"),
    ],
)
def test_a_dataset_json_that_cannot_be_used_is_refused(tmp_path, content, text):
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset\.json: ") as refusal:
        find(str(tmp_path / "dataset.json"))[0]
    assert text in str(refusal.value)


def test_a_csv_gives_labels_by_relative_or_file_name_and_rows_without_a_volume_are_counted(
    make_volume, tmp_path, caplog
):
    for name in ("x/a.nii.gz", "x/b.nii.gz", "y/b.nii.gz"):
        make_volume(name)
    table = tmp_path / "labels.csv"
    table.write_text("file,age,label\na.nii.gz,3,ill\nx/b.nii.gz,4,well\n./y/b.nii.gz,5,ill\n")
    settings = build_settings(source=str(tmp_path / "volumes"), class_labels=str(table))
    volumes = prepare_volumes(settings, seed=0, in_channels=1)
    labels = {file.name: file.label for file in (*volumes.train, *volumes.val)}
    assert volumes.class_names == ("ill", "well")
    assert labels == {"x/a.nii.gz": 0, "x/b.nii.gz": 1, "y/b.nii.gz": 0}
    assert "labels.csv" not in caplog.text
    others = "".join(f"{name},,ill\n" for name in ("y/a.nii.gz", "c", "d" * 99, "e"))
    table.write_text(table.read_text() + others)
    prepare_volumes(settings, seed=0, in_channels=1)
    text = f"labels.csv has 4 rows without a volume of the run, such as y/a.nii.gz, c, {'d' * 42}...\n"
    assert caplog.text.count(text) == 1
    table.write_text(f"file,age,label\n{others}")
    with pytest.raises(DataError, match=r"labels\.csv has only 4 rows without a volume .* paths below data\.source"):
        prepare_volumes(settings, seed=0, in_channels=1)


def test_volumes_without_one_row_are_reported_with_the_other_problems(make_volume, tmp_path):
    for name in ("x/b.nii.gz", "y/b.nii.gz", "c.nii.gz", "d.nii.gz"):
        make_volume(name)
    make_volume("a.nii.gz").write_text("no volume")
    (tmp_path / "labels.csv").write_text("file,label\na.nii.gz,1\nb.nii.gz,2\nc.nii.gz,1\nc.nii.gz,2\nd.nii.gz\n")
    settings = build_settings(source=str(tmp_path / "volumes"), class_labels=str(tmp_path / "labels.csv"))
    with pytest.raises(DataError, match="5 problems") as refusal:
        prepare_volumes(settings, seed=0, in_channels=1)
    for text in (
        "a.nii.gz: cannot be read as .nii.gz",
        *(f"{place}/b.nii.gz: no row in data.class_labels: " for place in "xy"),
        *("c.nii.gz: 2 rows in data.class_labels: ", "d.nii.gz: label is empty in data.class_labels: "),
    ):
        assert text in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        ("", "has the columns (none); file, label are needed"),
        ("name,label\n", "has the columns name, label; file, label are needed"),
        ("file,label,Label\na,b,1\n", "has the columns file, label, label; file, label are needed, once each"),
        ("file,label\na,1\n\nb,left, lower\n", "line 4 has 3 fields for 2 columns"),
        ('file,label\n"a,1\n', "line 2 cannot be read"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path, content, text):
    table = tmp_path / "labels.csv"
    if content is not None:
        table.write_text(content)
    with pytest.raises(DataError, match=r"data\.class_labels: .*labels\.csv") as refusal:
        rows_of(str(table), ["label"], ["a"], "data.class_labels")
    assert text in str(refusal.value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "make", "text"),
    [
        ("dataset.json", os.mkfifo, r"cannot be read \("),
        ("dataset.json", lambda path: path.write_bytes(b"\xff{}"), r"cannot be read \("),
        ("dataset.json", lambda path: path.symlink_to("dataset.json"), "does not exist"),
        ("x" * 300, lambda path: None, "does not exist; a folder, a dataset.json or phantoms is allowed"),
        ("~nobody-of-that-name/volumes", lambda path: None, "does not exist"),
        ("a.nii.gz", os.mkfifo, "is a single file"),
        ("empty", os.mkdir, r"holds no volume; \.nii .*check it"),
    ],
)
def test_source_that_is_neither_folder_nor_listing_is_refused(tmp_path, name, make, text):
    make(tmp_path / name)
    with pytest.raises(DataError, match=text):
        find(name if name.startswith("~") else str(tmp_path / name))


@pytest.mark.parametrize(
    ("folders", "classes"),
    [
        (["sick", "sick", "well"], ("sick", "well")),
        (["sick", "well"], ("sick", "well")),
        (["sub-01", "sub-01", "sub-02"], ()),
        (["subtype1", "subtype1", "subtype2"], ("subtype1", "subtype2")),
        (["Patient_7/ct", "Patient_7/mr", "Patient_8/ct"], ()),
        (["anna", "berta", "carla"], ()),
        (["sick", "sick", "."], ()),
        (["images/sick", "images/sick", "images/well"], ("sick", "well")),
    ],
    ids=str,
)
def test_folders_of_patients_and_folders_of_one_volume_are_no_classes(tmp_path, folders, classes):
    for number, folder in enumerate(folders):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / folder / f"{number}.npy", np.zeros((4, 4, 4), np.float32))
    assert class_names_of(with_folders(find(str(tmp_path))[0])) == classes


NAMES = ("a/case1_FLAIR.nii.gz", "a/case1_T1.nii.gz", "b/case2_FLAIR.nii.gz", "b/case2_t1.nii.gz", "b/old/case3.nii.gz")


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ([], [], [0, 1, 2, 3, 4]),
        (["*FLAIR*"], [], [0, 2]),
        (["*FLAIR*", "*_t1.*"], ["a/*"], [2, 3]),
        ([], ["case1_*", "b/old/*"], [2, 3]),
    ],
)
def test_patterns_choose_volumes_by_their_names(include, exclude, kept):
    volumes = discovered(*NAMES)
    found, notes = chosen(volumes, build_settings(include=include, exclude=exclude))
    assert [volume.name for volume in found] == [NAMES[number] for number in kept]
    assert len(notes) == len(NAMES) - len(kept)
    with pytest.raises(DataError, match=r"leave none of 5 volumes, such as a/case1_FLAIR\.nii\.gz; patterns have \*"):
        chosen(volumes, build_settings(include=["FLAIR"]))


def test_modalities_in_names_are_noticed_and_a_run_prepares_only_the_volumes_that_were_chosen(
    make_volume, tmp_path, caplog
):
    assert mixed_modalities(["direct.nii", "factory.nii", "ct_1.nii", "ct_2.nii", "petra.nii"]) is None
    for number in range(3):
        make_volume(f"{number}_FLAIR.nii.gz")
        make_volume(f"{number}_T1.nii.gz")
    source = str(tmp_path / "volumes")
    split = prepare_volumes(build_settings(source=source, include=["*T1*"]), 0, 1)
    assert sorted(file.name for file in (*split.train, *split.val)) == [f"{number}_T1.nii.gz" for number in range(3)]
    assert "no pattern of data.include matches" in caplog.text
    assert "several modalities" not in caplog.text
    prepare_volumes(build_settings(source=source), 0, 1)
    assert "are of several modalities: FLAIR (3), T1 (3); data.include: ['*FLAIR*'] takes one" in caplog.text
