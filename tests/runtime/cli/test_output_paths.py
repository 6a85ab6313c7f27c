"""Tests of the check that a command makes of its output path before the long work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.cli import check_output_file, check_output_folder
from settings import UserError


@pytest.mark.parametrize(
    ("check", "name", "sentence"),
    [
        (check_output_file, "", "--json: "),
        (check_output_file, "folder", "is not a file that can be overwritten"),
        (check_output_file, "file/deep/result.json", "file: Not a directory"),
        (check_output_file, "broken", "is not a file that can be overwritten"),
        (check_output_folder, "", "--out: the path is empty"),
        (check_output_folder, "broken", "broken: No such file"),
        (check_output_folder, "/proc/deep/out", "/proc: "),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(check, name, sentence, here):
    with pytest.raises(UserError) as caught:
        check(name)
    assert sentence in str(caught.value)
    assert name in str(caught.value)


def test_a_path_that_can_be_written_is_accepted_and_nothing_is_made(here):
    before = sorted(here.iterdir())
    for name in ("file", "new.json", "folder/new.json", "new/deep/new.json", str(here / "new.json"), "/dev/null"):
        check_output_file(name)
        check_output_file(Path(name))
    for name in (".", "folder", "new/deep", str(here)):
        check_output_folder(name)
        check_output_folder(Path(name))
    assert sorted(here.iterdir()) == before
    assert (here / "file").read_text() == "kept"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, which has a file, a folder and a link to nothing."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").symlink_to(tmp_path / "missing" / "target")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_output_never_replaces_an_input_nor_waits_for_a_pipe(tmp_path):
    config, pipe, link = tmp_path / "a.yaml", tmp_path / "pipe", tmp_path / "link.yaml"
    config.write_text("name: a\n")
    link.symlink_to(config)
    os.mkfifo(pipe)
    check_output_file(config, "--json")
    for path in (config, link, tmp_path / "." / "a.yaml"):
        with pytest.raises(UserError, match="is an input of this command"):
            check_output_file(path, "--write-config", [tmp_path / "absent", config])
    with pytest.raises(UserError, match="is not a file"):
        check_output_file(pipe, "--json")
