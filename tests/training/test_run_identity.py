"""What a run is bound to: the content of its volumes, its autoencoder, and the end of its schedule."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import prepare_volumes
from data.formats import write_nifti
from data.store import SUFFIX
from models.weight_files import load_weights, save_weights
from runtime.files import RunFolder
from runtime.processes import Process
from settings import CheckpointError, DataError, Settings
from tests.finished_run import finished_run, run_here
from training.checkpoints import ResumableRun


class TinyStep:
    """The part of a training step that resuming uses."""

    stage = "autoencoder"
    samples_per_update = 1

    def __init__(self, settings: Settings) -> None:
        self.settings, self.training = settings, settings.autoencoder.training
        self.process = Process(torch.device("cpu"))
        self.weight = torch.zeros(2)
        self.metadata: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"networks": {"tiny": {"weight": self.weight}}, "optimizers": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["networks"]["tiny"]["weight"])


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """Four volumes, uncompressed so that other content has the same size."""
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        write_volume(tmp_path / "volumes" / f"v{number}.nii", number)
    return tmp_path / "volumes"


def write_volume(path: Path, seed: int) -> None:
    voxels = np.random.default_rng(seed).normal(100, 30, (1, 16, 16, 16)).astype(np.float32)
    write_nifti(path, voxels, np.eye(4))


def replace_content(path: Path) -> None:
    """Replace this volume by another of the same size, and restore its time."""
    before = path.stat()
    other = path.parent.parent / "other.nii"
    write_volume(other, 99)
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def tiny(source: Path, values: dict[str, Any]) -> Settings:
    values["data"] |= {"source": str(source), "num_workers": 0}
    return Settings.model_validate(values)


def volumes_of(settings: Settings):
    return prepare_volumes(settings.data, settings.seed, 1)


def run_of(settings: Settings) -> ResumableRun:
    step: Any = TinyStep(settings)
    return ResumableRun(step, RunFolder(Path("run")), volumes_of(settings))


def test_a_run_goes_on_with_volumes_that_moved_and_not_with_one_replaced_under_its_name(source, tiny_values, tmp_path):
    run_of(tiny(source, tiny_values)).save(1)
    os.utime(source / "v1.nii", ns=(1, 1))
    moved = source.rename(tmp_path / "elsewhere")
    settings = tiny(moved, tiny_values)
    assert run_of(settings).resume() == 1
    replace_content(moved / "v2.nii")
    with pytest.raises(CheckpointError, match=r"the content of v2\.nii changed; put the files back to resume"):
        run_of(settings).resume()


def test_latents_of_replaced_content_are_not_used_and_change_during_encoding_is_noticed(source, tiny_values, caplog):
    from diffusion.latents import prepare_latents
    from training.ldm_step import LatentDiffusionStep

    settings = tiny(source, tiny_values)
    cpu = Process(torch.device("cpu"))
    codec = LatentDiffusionStep(settings, cpu, load_weights=False).codec
    caplog.set_level(logging.INFO)

    def latents(volumes):
        caplog.clear()
        found = prepare_latents(codec, volumes, settings, cpu)
        assert found.read is not None
        names = [file.name for file in (*volumes.train, *volumes.val)]
        return found.read(names.index("v2.nii"), 0), caplog.text

    before, _ = latents(volumes_of(settings))
    again, said = latents(volumes_of(settings))
    assert torch.equal(again, before)
    assert "4 of 4 found" in said
    checked = volumes_of(settings)
    replace_content(source / "v2.nii")
    after, said = latents(volumes_of(settings))
    assert not torch.equal(after, before)
    assert "3 of 4 found" in said
    for path in Path("runs/latents").rglob(f"*{SUFFIX}"):
        path.unlink()
    # The prepared volume still has the content that was checked; the file itself does not.
    assert torch.equal(latents(checked)[0], before)
    settings = settings.with_overrides({"data.prepared": "none"})
    for path in Path("runs/latents").rglob(f"*{SUFFIX}"):
        path.unlink()
    with pytest.raises(DataError, match=r"v2\.nii: changed since it was checked"):
        latents(checked)


def test_a_bug_is_not_reported_as_a_damaged_checkpoint(source, tiny_values, monkeypatch):
    settings = tiny(source, tiny_values)
    run = run_of(settings)
    run.save(1)

    def fail(*_: object, **__: object) -> None:
        raise TypeError("a mistake in the program")

    with monkeypatch.context() as patch:
        patch.setattr(TinyStep, "load_state_dict", fail)
        with pytest.raises(TypeError, match="a mistake"):
            run.resume()
    path = run.checkpoints.newest()
    assert path is not None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", fail)
        with pytest.raises(TypeError, match="a mistake"):
            run.checkpoints.read(path)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="cannot be read"):
            run.checkpoints.read(path)


def test_samples_and_evaluations_with_another_autoencoder_are_refused(tmp_path, tmp_path_factory, capsys):
    run = shutil.copytree(finished_run(tmp_path_factory), tmp_path / "tiny")
    sample = ["scripts/sample.py", "--run", run, "--num", "1", "--steps", "1", "--out", tmp_path / "drawn"]
    assert run_here(*sample) == 0
    capsys.readouterr()
    # Stage 1 trained on.
    state, metadata = load_weights(run / "autoencoder.safetensors")
    save_weights(run / "autoencoder.safetensors", {name: 2 * tensor for name, tensor in state.items()}, metadata)
    for command in (sample, ["scripts/evaluate.py", "--run", run, "--num", "2", "--steps", "1"]):
        assert run_here(*command) == 2
        said = capsys.readouterr().err
        assert "ldm.safetensors: was trained on latents of an autoencoder whose weights differ from" in said
        assert "restore that autoencoder, or train stage 2 on this one under another name" in said
    # An imported file has no hash.
    weights = run / "ldm.safetensors"
    state, metadata = load_weights(weights)
    del metadata["autoencoder"]
    save_weights(weights, state, metadata)
    assert run_here(*sample) == 0
    assert "does not record which autoencoder it was trained on" in capsys.readouterr().err
