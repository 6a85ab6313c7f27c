"""scripts/reconstruct.py: a volume comes back on its own grid, in its own orientation."""

from __future__ import annotations

import nibabel as nib
import numpy as np

from data.formats import write_nifti
from tests.finished_run import finished_run, run_here

COMMAND = ["scripts/reconstruct.py", "--run"]


def test_reconstructions_are_on_the_grids_of_their_volumes(command, tmp_path, tmp_path_factory):
    run = finished_run(tmp_path_factory)
    affine = np.array([[0, 0, -2.0, 5], [1.5, 0, 0, 6], [0, 3.0, 0, 7], [0, 0, 0, 1]])
    rng = np.random.default_rng(0)
    for name, shape in (("a.nii.gz", (1, 20, 11, 30)), ("sub/b.nii", (1, 9, 16, 12))):
        write_nifti(tmp_path / "in" / name, rng.normal(100, 30, shape).astype(np.float32), affine)
    result = command(*COMMAND, run, "--input", "in", "--out", "out")
    assert result.returncode == 0, result.stderr
    for name, grid in (("a", (20, 11, 30)), ("sub/b", (9, 16, 12))):
        image = nib.load(tmp_path / "out" / f"{name}_reconstruction.nii.gz")
        assert image.shape == grid
        np.testing.assert_allclose(image.affine, affine, atol=1e-5)
        assert f"out/{name}_reconstruction.nii.gz: PSNR" in result.stderr
    assert ("next: python train_ldm.py --config" in result.stderr) == (not (run / "ldm.safetensors").exists())
    volume, out = tmp_path / "in" / "a.nii.gz", tmp_path / "single"
    assert run_here(*COMMAND, run, "--input", volume, "--out", out) == 0
    assert (tmp_path / "single" / "a_reconstruction.nii.gz").is_file()


def test_label_maps_of_a_folder_are_left_out_as_in_training(tmp_path, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = finished_run(tmp_path_factory)
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        image = rng.normal(100, 30, (1, 16, 16, 16)).astype(np.float32)
        write_nifti(tmp_path / f"in/{name}.nii.gz", image, np.eye(4))
        blocks = rng.integers(0, 40, (1, 4, 4, 4)).repeat(4, 1).repeat(4, 2).repeat(4, 3).astype(np.int16)
        write_nifti(tmp_path / f"in/{name}_parcels.nii.gz", blocks - blocks.min(), np.eye(4))
        write_nifti(tmp_path / f"in/{name}_seg.nii.gz", (image > 100).astype(np.uint8), np.eye(4))
    assert run_here(*COMMAND, run, "--input", "in", "--out", "out") == 0
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["a_reconstruction.nii.gz", "b_reconstruction.nii.gz"]
    said = capsys.readouterr().err
    assert "a_seg.nii.gz: left out, a label map by its name" in said
    assert "a_parcels.nii.gz: left out, it looks like a label map" in said
    write_nifti(tmp_path / "in/flat.nii.gz", np.ones((1, 16, 16, 16), np.float32), np.eye(4))
    (tmp_path / "in/broken.nii.gz").write_bytes(b"no volume")
    for source, words in (("in", "--input: in has 2 problems:"), ("gone", "--input: gone does not exist")):
        assert run_here(*COMMAND, run, "--input", source, "--out", "other") == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
