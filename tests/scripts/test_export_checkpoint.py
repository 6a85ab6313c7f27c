"""The way out: exported files give our samples with MONAI alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import yaml

from models.weight_files import load_weights, save_weights
from tests.conftest import ROOT
from tests.finished_run import finished_run, run_here

EXAMPLE = ROOT / "docs" / "examples" / "sample_with_monai.py"


def sampled_with(folder: Path, sampler: str) -> Path:
    """Return the copy of a run as if another sampler had been configured."""
    path, config, changes = folder / "ldm.safetensors", folder / "config.yaml", {"sampler": sampler}
    state, metadata = load_weights(path)
    metadata["settings"]["ldm"]["sampling"] |= changes
    save_weights(path, state, metadata)
    values = yaml.safe_load(config.read_text())
    values["ldm"]["sampling"] |= changes
    config.write_text(yaml.safe_dump(values))
    return folder


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_exported_files_give_our_samples_with_monai_alone(sampler, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = sampled_with(shutil.copytree(finished_run(tmp_path_factory), tmp_path / "run"), sampler)
    for stage in ("autoencoder", "ldm"):
        out = Path("exported") / f"{stage}.safetensors"
        assert run_here("scripts/export_checkpoint.py", "--weights", run / f"{stage}.safetensors", "--out", out) == 0
    assert run_here("scripts/sample.py", "--run", run, "--num", "3", "--seed", "5", "--out", "ours") == 0
    assert run_here(str(EXAMPLE), "exported", "--num", "3", "--seed", "5", "--device", "cpu", "--out", "theirs") == 0
    ours, theirs = (sorted(Path(name).glob("*.nii.gz")) for name in ("ours", "theirs"))
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(map(nib.load, ours), map(nib.load, theirs), strict=True):
        voxels = np.asarray(mine.dataobj)
        # Both sum in float32, in another order.
        np.testing.assert_allclose(np.asarray(other.dataobj), voxels, atol=1e-5 * (voxels.max() - voxels.min()))
        np.testing.assert_allclose(other.affine, mine.affine, atol=1e-5)
    assert np.abs(np.diff([np.asarray(nib.load(path).dataobj) for path in ours], axis=0)).max() > 1


def test_the_example_imports_nothing_of_this_project():
    text = EXAMPLE.read_text()
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"__future__", "argparse", "hashlib", "itertools", "json", "pathlib", "typing"} | {
        *("monai", "nibabel", "numpy", "safetensors", "torch")
    }
