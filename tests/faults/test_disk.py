"""Full disks, read-only folders and checkpoints that were tampered with."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import signal
from pathlib import Path

import pytest
import torch
import yaml

from settings import CheckpointError
from tests.faults.conftest import values
from tests.faults.runs import checkpoints
from training.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def small_disk(warm, undisturbed, tmp_path_factory) -> str:
    """The output of a run whose disk was full, then had room again, then was read-only."""
    folder = tmp_path_factory.mktemp("small_disk")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values()))
    size = checkpoints(undisturbed, "autoencoder")[0].stat().st_size
    command = warm(folder, "tests/faults/small_disk.py", str(5 * size // 2 // 1024), output=folder / "output.log")
    command.wait()
    if "cannot mount here" in command.output:
        pytest.skip("this user may not mount a disk of limited size")
    return command.output


def test_full_disk_is_reported_and_the_run_resumes_when_there_is_room(small_disk, undisturbed):
    small, large = re.split("act: (?:large|read-only)", small_disk)[:2]
    assert "small ended with 2" in small, small
    assert "the disk is full" in small
    assert "earlier checkpoints are untouched" in small
    assert "Traceback" not in small_disk
    assert re.search(r"resuming autoencoder after step [246]", large), large
    assert "large ended with 0" in large
    weights = re.search("weights: ([0-9a-f]+)", small_disk)
    assert weights is not None
    assert bytes.fromhex(weights[1]) == (undisturbed / "runs" / "tiny" / "autoencoder.safetensors").read_bytes()


def test_read_only_folder_is_reported(small_disk):
    assert "runs/tiny: cannot be written (Read-only file system)" in small_disk
    assert "read-only ended with 2" in small_disk


def damaged_run(undisturbed: Path, folder: Path) -> Path:
    """Copy a run and return its newest checkpoint."""
    target = folder / "runs" / "tiny" / "checkpoints"
    target.mkdir(parents=True)
    for path in checkpoints(undisturbed, "autoencoder"):
        (target / path.name).write_bytes(path.read_bytes())
    return max(target.iterdir())


def test_truncated_newest_checkpoint_is_reported_and_the_previous_one_resumes_to_the_same_weights(
    start, undisturbed, tmp_path
):
    newest = damaged_run(undisturbed, tmp_path)
    newest.write_bytes(newest.read_bytes()[:-100])
    command = start("autoencoder")
    assert command.wait() == 0, command.output
    assert f"{newest.name}: damaged, because its content does not match its checksum" in command.output
    assert "resuming autoencoder after step 6" in command.output
    weights = [(f / "runs" / "tiny" / "autoencoder.safetensors").read_bytes() for f in (tmp_path, undisturbed)]
    assert weights[0] == weights[1]


def test_second_command_on_a_run_is_refused_and_the_first_continues(start, tmp_path):
    first = start("autoencoder", "autoencoder.training.max_steps=2000", output="first.log")
    while not (tmp_path / "runs" / "tiny" / ".lock").exists():
        assert first.exit_code is None, first.output
    second = start("autoencoder", "autoencoder.training.max_steps=2000", output="second.log")
    assert second.wait() == 2, second.output
    assert f"in use by another process (pid {first.pid} on " in second.output
    assert "grid -> latent" not in second.output  # nothing was prepared or predicted before
    assert first.exit_code is None, first.output
    first.send(signal.SIGKILL)
    first.wait()


def test_checkpoint_of_another_program_is_refused(start, undisturbed, tmp_path):
    newest = damaged_run(undisturbed, tmp_path)
    state = torch.load(newest, weights_only=True)
    del state["networks"]
    for path in newest.parent.iterdir():
        path.unlink()
    Checkpoints(newest.parent, "autoencoder", 2).save(8, state)
    command = start("autoencoder")
    assert command.wait() == 2, command.output
    assert "not a checkpoint of this version of the program (networks is missing" in command.output
    assert "Traceback" not in command.output


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_pickled_code_in_a_checkpoint_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "payload.pt"
    torch.save({"step": 1, "payload": Payload()}, temporary)
    digest = hashlib.sha256(temporary.read_bytes()).hexdigest()[:16]
    path = temporary.rename(tmp_path / f"autoencoder_step_00000001_{digest}.pt")
    found = Checkpoints(tmp_path, "autoencoder", 2)
    assert found.newest() == path
    with pytest.raises(CheckpointError, match="cannot be read"):
        found.read(path)
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match="cannot be read"):
        found.read(path)
    assert not (tmp_path / "executed").exists()
