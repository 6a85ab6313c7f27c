"""Stage 2 with conditions as a user runs it: checked, trained, resumed, sampled in the condition's space."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.formats import write_nifti
from settings import CheckpointError, DataError
from tests.conditional_run import AFFINE, LABEL_MAPS, conditional_config
from tests.finished_run import run_here, train_ldm


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return conditional_config(tmp_path, LABEL_MAPS)


def test_a_run_with_label_maps_trains_resumes_and_samples_in_their_space(config, capsys):
    assert train_ldm(config) == 0
    expected = load_file("runs/tiny/ldm.safetensors")
    lines = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert any("val_diffusion" in line for line in lines)
    assert Path("runs/tiny/previews/ldm_00000004.png").is_file()

    # Stopped after two steps and resumed, without the kept conditions.
    for path in [*Path("runs/tiny/checkpoints").glob("ldm_step_00000004*"), *Path("runs/latents").rglob("*.*")]:
        path.unlink()
    Path("runs/tiny/ldm.safetensors").unlink()
    assert train_ldm(config) == 0
    resumed = load_file("runs/tiny/ldm.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.items())

    arguments = ("--run", "runs/tiny", "--steps", "2")
    assert run_here("scripts/sample.py", *arguments, "--labels", "maps/case_3.nii.gz", "--num", "2", "--out", "a") == 0
    files = sorted(Path("a").glob("*.nii.gz"))
    assert [path.name for path in files] == [f"case_3_seed0_steps2_{number:04d}.nii.gz" for number in range(2)]
    first, second = (nib.load(path) for path in files)
    assert first.shape == (20, 16, 14)
    np.testing.assert_allclose(first.affine, AFFINE)
    assert np.abs(first.get_fdata() - second.get_fdata()).max() > 1e-3
    assert run_here("scripts/sample.py", *arguments, "--labels", "maps", "--batch-size", "3", "--out", "b") == 0
    assert len(list(Path("b").glob("case_*.nii.gz"))) == 8
    write_nifti(Path("more.nii.gz"), np.full((1, 20, 16, 14), 3.0, np.float32), AFFINE)
    capsys.readouterr()
    assert run_here("scripts/sample.py", *arguments, "--labels", "more.nii.gz") == 2
    assert "label values from 3 to 3; ldm.conditioning.labels.num_classes: 3 allows 0 to 2" in capsys.readouterr().err
    assert run_here("scripts/sample.py", *arguments, "--labels", "nowhere") == 2
    assert "--labels: nowhere does not exist" in capsys.readouterr().err


def test_resuming_with_other_label_maps_is_refused(config):
    train_ldm(config, "ldm.training.max_steps=2", "ldm.sampling.num_previews=0")
    write_nifti(Path("maps/case_1.nii.gz"), np.zeros((1, 20, 16, 14), np.float32), AFFINE)
    with pytest.raises(CheckpointError, match="made with other conditions: the volumes' partners changed"):
        train_ldm(config, "ldm.sampling.num_previews=0")


def test_batches_are_the_same_wherever_latents_are_kept(config):
    found = []
    for cache in ("disk", "memory", "none"):
        overrides = (f"name={cache}", f"ldm.latents.cache={cache}", "ldm.training.max_steps=2")
        autoencoder = "ldm.autoencoder=runs/tiny/autoencoder.safetensors"
        train_ldm(config, *overrides, autoencoder, "ldm.sampling.num_previews=0")
        found.append(load_file(f"runs/{cache}/ldm.safetensors"))
    assert all(torch.equal(tensor, other[name]) for other in found[1:] for name, tensor in found[0].items())


def test_a_missing_partner_stops_training_and_the_check_of_the_data(config, capsys):
    Path("maps/case_5.nii.gz").unlink()
    with pytest.raises(DataError, match=r"case_5\.nii\.gz: no partner in ldm\.conditioning\.labels\.source: maps"):
        train_ldm(config)
    assert run_here("scripts/check_data.py", "--config", config, "--json", "check.json") == 2
    assert "case_5.nii.gz: no partner" in capsys.readouterr().out
    assert len(json.loads(Path("check.json").read_text())["partner_problems"]) == 1


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["ldm.conditioning.labels.num_classes=0"], "ldm.conditioning.labels.num_classes: 0 with a source"),
        (["ldm.conditioning.labels.num_classes=1"], "ldm.conditioning.labels.num_classes: 1 label value"),
        (["ldm.conditioning.labels.source=null"], "ldm.conditioning.labels.source: null with num_classes above 0"),
        (
            ["ldm.conditioning.labels.dropout=0", "ldm.sampling.guidance_scale=2"],
            "2 with conditioning dropout 0, so the network never learns to predict without a condition",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(config, overrides, text, capsys):
    assert run_here("train_ldm.py", "--config", config, *overrides) == 2
    assert text in capsys.readouterr().err
