"""scripts/sample.py: files with the position and intensities of the data, the same for a seed, and readable errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from data.formats import write_nifti
from models.weight_files import load_weights, save_weights
from scripts import sample
from tests.finished_run import finished_run, run_here
from training.validation.previews import GAP, LINE, PLANE_PIXELS


@pytest.fixture
def run(tmp_path_factory):
    return finished_run(tmp_path_factory)


def test_samples_are_nifti_files_with_spacing_and_intensities_of_the_data(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ("scripts/sample.py", "--run", run, "--num", "3", "--batch-size", "2", "--out", "drawn")
    assert run_here(*command) == 0
    assert capsys.readouterr().err.rstrip().endswith(f"next: python scripts/evaluate.py --run {run}")
    files = sorted((tmp_path / "drawn").glob("*.nii.gz"))
    assert len(files) == 3
    image = nib.load(files[0])
    assert image.shape == (16, 16, 16)
    np.testing.assert_allclose(image.header.get_zooms(), [12.5, 15.0, 12.5])
    # The centre of the grid is the origin.
    np.testing.assert_allclose(image.affine @ [7.5, 7.5, 7.5, 1], [0, 0, 0, 1], atol=1e-4)
    voxels = image.get_fdata()
    assert voxels.min() >= 0
    assert voxels.max() <= 1000
    assert voxels.std() > 1
    montage = np.asarray(Image.open(tmp_path / "drawn" / "montage_seed0.png"))
    assert montage.shape[1] == 3 * PLANE_PIXELS + 2 * GAP
    # A title, the names of the planes, and for each sample its name and its planes; the volume is 200 x 240 x 200 mm.
    assert montage.shape[0] == 2 * LINE + 3 * (LINE + PLANE_PIXELS + GAP) - GAP

    monkeypatch.setattr(sample, "MOST_SHOWN", 1)
    assert sample.main(sample.parse(["--run", str(run), "--num", "2", "--out", str(tmp_path / "again")])) == 0
    assert Image.open(tmp_path / "again" / "montage_seed0.png").height == 3 * LINE + PLANE_PIXELS
    for path in sorted((tmp_path / "again").glob("*.nii.gz")):
        other = nib.load(tmp_path / "drawn" / path.name).get_fdata()
        np.testing.assert_allclose(nib.load(path).get_fdata(), other, atol=1e-5 * 1000)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--class", "tumour"], "'tumour' is not a class of the run; allowed: healthy, lesion, ventricles"),
        (["--run", "runs/nowhere"], "not a run folder"),
        (["--steps", "2000"], "--steps: 2,000 is more than the run was trained with; allowed: 1 to 1,000"),
        (["--num", "0"], "'0' is not a whole number of at least 1"),
        (["--steps", "2.5"], "'2.5' is not a whole number of at least 1"),
        (["--guidance-scale", "nan"], "'nan' is not a number of at least 0"),
    ],
)
def test_wrong_arguments_are_refused(run, arguments, text, capsys):
    assert run_here("scripts/sample.py", "--run", run, *arguments) == 2
    assert text in capsys.readouterr().err


def test_a_run_without_stage_two_and_one_with_changed_settings_are_refused(run, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    values = yaml.safe_load((run / "config.yaml").read_text())
    (bare / "config.yaml").write_text(yaml.safe_dump(values))
    assert run_here("scripts/sample.py", "--run", bare) == 2
    said = "ldm.safetensors: not found, so there is no trained diffusion model; run train_ldm.py"
    assert said in capsys.readouterr().err
    values["ldm"]["scheduler"]["prediction"] = "v"
    (bare / "config.yaml").write_text(yaml.safe_dump(values))
    (bare / "ldm.safetensors").write_bytes((run / "ldm.safetensors").read_bytes())
    assert run_here("scripts/sample.py", "--run", bare) == 2
    assert 'ldm.scheduler.prediction: "epsilon" -> "v"' in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_values_that_are_not_finite_are_an_error_and_not_a_result(run, stage, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(run, tmp_path / "broken")
    path = folder / f"{stage}.safetensors"
    state, metadata = load_weights(path)
    state["decoder.blocks.0.conv.weight" if stage == "autoencoder" else "conv_in.conv.weight"].view(-1)[0] = torch.nan
    save_weights(path, state, metadata)
    if stage == "ldm":
        first, where = ["sample.py", "--num", "2", "--out", "out"], "sample_seed0_0000.nii.gz: "
    else:
        (folder / "ldm.safetensors").unlink()
        shutil.rmtree(folder / "checkpoints")
        write_nifti(Path("a.nii.gz"), np.random.default_rng(0).random((1, 16, 16, 16), np.float32), np.eye(4))
        first, where = ["reconstruct.py", "--input", "a.nii.gz", "--out", "out"], "a.nii.gz: "
    for script, *options in (first, ["evaluate.py", "--num", "2", "--json", "e.json"]):
        assert run_here(f"scripts/{script}", "--run", folder, *options) == 2
        said = capsys.readouterr().err
        assert "the networks gave values that are not finite" in said
        assert where in said or script == "evaluate.py"
    assert not list(tmp_path.glob("out/*"))
    assert not Path("e.json").exists()
