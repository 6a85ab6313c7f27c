"""The Python API: what docs/python.md shows runs, and gives what the commands give."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml

from data.formats import write_nifti
from evaluation import api
from scripts.installed import lean3d
from settings import UserError
from tests.conftest import ROOT
from tests.finished_run import finished_run
from tests.support.tiny_config import TINY


@pytest.fixture
def folder(tmp_path, monkeypatch, tmp_path_factory):
    """A folder with a run, a volume and tiny configs under the names that the document uses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(finished_run(tmp_path_factory))
    voxels = np.random.default_rng(1).random((1, 18, 20, 14), np.float32) * 500
    write_nifti(tmp_path / "case.nii.gz", voxels, np.diag([-2.0, 3.0, 4.0, 1.0]))
    (tmp_path / "configs").mkdir()
    for name in ("quickstart", "high_res", "quality"):
        device = {"type": "cpu"} if name == "quickstart" else {"type": "cuda"}
        (tmp_path / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(TINY | {"name": name, "device": device}))
    return tmp_path


@pytest.mark.usefixtures("shared_workers")
def test_every_snippet_of_the_document_runs(folder, monkeypatch, capsys):
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(snippets) == 5
    monkeypatch.setitem(sys.modules, "lean3d", lean3d)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet, names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "(1, 18, 20, 14) (2.0, 3.0, 4.0)"
    assert nib.load("reconstruction.nii.gz").shape == (18, 20, 14)
    assert sorted(path.name for path in Path().glob("sample_*")) == ["sample_0.nii.gz", "sample_1.nii.gz"]
    assert any(re.fullmatch(r"\w+/phantom_\d+\.nii\.gz \(1, 16, 16, 16\) .*", line) for line in printed)
    assert any(re.fullmatch(r"\d+\.\d GiB, .*", line) for line in printed)
    assert any(line.startswith("as configured ") for line in printed)


def test_an_array_with_its_affine_gives_what_its_file_gives(folder):
    run = api.open_run("runs/quickstart")
    image = nib.load("case.nii.gz")
    array = np.asarray(image.dataobj)
    from_file = run.encode("case.nii.gz")
    for voxels in (array, torch.from_numpy(array)[None]):
        latent = run.encode(api.Volume.of(voxels, image.affine))
        torch.testing.assert_close(latent, from_file, rtol=0, atol=0)
    # The x axis of the file points the other way, so an array without its affine is another volume.
    assert not torch.equal(run.encode(api.Volume.of(array, spacing_mm=(2, 3, 4))), from_file)
    with pytest.raises(UserError, match=r"voxels: found shape \(14,\) .*; allowed: \(C, X, Y, Z\)"):
        api.Volume.of(array[0, 0])


ARRAY = np.random.default_rng(0).random((6, 7, 8))
untyped: Any = api


@pytest.mark.parametrize(
    "make",
    [
        lambda: api.Volume(ARRAY, np.eye(4)),
        lambda: api.Volume.of(ARRAY + 1j),
        lambda: api.Volume.of(np.full((2, 2, 2), "x")),
        lambda: api.Volume.of(ARRAY, spacing_mm=(1, 1)),
        lambda: api.Volume.of(ARRAY, spacing_mm=(0, 1, 1)),
        lambda: api.Volume.of(ARRAY, np.eye(3)),
        lambda: api.Volume.of(ARRAY, np.zeros((4, 4))),
        lambda: api.Volume.of(ARRAY).save("volume.npy"),
        lambda: untyped.open_run("runs/none", best="both"),
        lambda: next(untyped.prepared_volumes("none.yaml", part="test")),
        lambda: untyped.predict_memory("none.yaml", stage="vae"),
        lambda: api.walk_ladder("none.yaml", budget_gb=-1),
        lambda: untyped.walk_ladder("none.yaml", budget_gb=1, order="any"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(make):
    with pytest.raises(UserError, match="allowed"):
        make()


def test_a_run_refuses_what_does_not_fit_it(folder):
    run: Any = api.open_run("runs/quickstart")
    with pytest.raises(UserError, match="'tumour' is not a class of the run"):
        run.sample(1, class_name="tumour")
    with pytest.raises(AttributeError, match="no attribute 'open'; it has UserError, Volume, open_run"):
        _ = lean3d.open
    latent = run.encode("case.nii.gz")
    torch.testing.assert_close(run.decode(latent.double()), run.decode(latent))
    for wrong in (latent[None], latent[:, :1], latent[:1], latent.numpy(), latent.long()):
        with pytest.raises(UserError, match=r"latent: found .*; allowed: one tensor of real numbers"):
            run.decode(wrong)
    with pytest.raises(UserError, match=r"Volume.of makes one of an array"):
        run.encode(ARRAY)
    with pytest.raises(UserError, match=r"^the volume: 2 channels"):
        run.encode(api.Volume.of(np.stack([ARRAY, ARRAY])))
    for name in ("num", "steps", "batch_size"):
        with pytest.raises(UserError, match=f"{name}: found 0; allowed: whole numbers from 1"):
            run.sample(**{name: 0})
    assert run.encode(api.Volume.of(torch.from_numpy(ARRAY).bfloat16())).shape == latent.shape
