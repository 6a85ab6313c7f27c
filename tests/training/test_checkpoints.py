"""Checkpoints survive what happens to files."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
import torch

from settings import CheckpointError, TrainingError
from training import checkpoints as module
from training.checkpoints import Checkpoints


def saved(folder: Path, *steps: int, keep: int = 2) -> Checkpoints:
    found = Checkpoints(folder, "autoencoder", keep)
    for step in steps:
        found.save(step, {"weight": torch.full((4,), float(step))})
    return found


def newest(found: Checkpoints) -> Path:
    path = found.newest()
    assert path is not None
    return path


def test_the_newest_are_kept_and_read_back_and_other_files_left_alone(tmp_path):
    assert (saved(tmp_path / "missing").newest(), saved(tmp_path / "missing").newest_step()) == (None, 0)
    other = tmp_path / "autoencoder_step_00000009.pt"
    other.write_text("not one of ours")
    assert saved(tmp_path).newest() is None
    found = saved(tmp_path, 1, 2, 3)
    other.unlink()
    assert sorted(path.name[16:25] for path in tmp_path.iterdir()) == ["_00000002", "_00000003"]
    state = found.read(newest(found))
    assert (state["step"], state["stage"], found.newest_step()) == (3, "autoencoder", 3)
    torch.testing.assert_close(state["weight"], torch.full((4,), 3.0))


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    found = saved(tmp_path, 1)

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Of the two, Python's versions call either; permissions do not bind root.
    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    for look in (found.newest, found.newest_step):
        with pytest.raises(PermissionError):
            look()


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_newest_is_named_set_aside_and_the_one_before_is_used(tmp_path, caplog, damage):
    found = saved(tmp_path, 1, 2)
    damaged = newest(found)
    content = bytearray(damaged.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    damaged.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    path = newest(found)
    assert found.read(path)["step"] == 1
    assert damaged.name in caplog.text
    assert damaged.with_suffix(".damaged").exists()
    found.save(3, {})
    assert path.exists(), "a damaged file must not push out a good one"
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="every checkpoint of stage autoencoder is damaged"):
        newest(found)


def test_an_interrupted_save_leaves_nothing_that_looks_like_a_checkpoint(tmp_path, monkeypatch):
    found = saved(tmp_path, 1)

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        found.save(2, {})
    monkeypatch.undo()
    assert found.read(newest(found))["step"] == 1
    (tmp_path / ".autoencoder_step_00000002.123.tmp").write_bytes(b"left by a killed process")
    found.save(3, {})
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    found = saved(tmp_path, 1)

    class FullDisk(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.io, "FileIO", FullDisk)
    with pytest.raises(TrainingError, match=r"step 2 could not be written \(No space left on device\)"):
        found.save(2, {"weight": torch.zeros(4)})
    assert found.read(newest(found))["step"] == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to("gone"), "No such file or directory"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "a folder, not a file"),
    ],
)
def test_what_is_not_a_regular_file_under_the_name_of_a_checkpoint_is_reported(tmp_path, make, words):
    found = saved(tmp_path, 1)
    strange = tmp_path / f"autoencoder_step_00000002_{'0' * 16}.pt"
    make(strange)
    with pytest.raises(CheckpointError, match=rf"{strange.name}: cannot be read \({words}\); make it readable"):
        found.newest()
