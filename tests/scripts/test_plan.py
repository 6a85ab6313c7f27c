"""scripts/plan.py as a user runs it, with real predictions of small networks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.formats import write_nifti
from memory.predict import Predictor
from memory.predict.prediction import GIB
from scripts import plan
from settings import ConfigError, load_settings
from tests.finished_run import run_here

# Both widths are given, so two predictions are enough.
SMALL = (
    *("autoencoder.num_channels=[8,16]", "autoencoder.training.discriminator.num_channels=8"),
    *("ldm.unet.num_channels=[16,32]", "ldm.unet.num_res_blocks=1"),
)


pytestmark = pytest.mark.usefixtures("shared_workers")


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(4):
        voxels = rng.uniform(100, 900, (1, 18, 16, 17)).astype(np.float32)
        write_nifti(tmp_path / "volumes" / f"{number}.nii", voxels, np.eye(4))
    return tmp_path / "volumes"


def test_plan_is_written_and_both_stages_agree_with_it(tmp_path, volumes, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--quiet", "--data", "volumes", "--budget-gb", "6", "--out", "configs/mine.yaml"]
    assert run_here("scripts/plan.py", *options, *SMALL) == 0
    printed = capsys.readouterr().out
    assert "next: python train_autoencoder.py --config configs/mine.yaml --dry-run" in printed
    settings = load_settings("configs/mine.yaml", stage="ldm")
    assert settings.name == "mine"
    assert settings.data.use_augmentation
    assert settings.data.source == str(volumes)
    assert "memorise" in Path("configs/mine.yaml").read_text()
    with Predictor() as predictor:
        needed = predictor.predict(settings, "autoencoder").required_bytes
    assert f"stage 1 {needed / GIB:.1f} GiB (" in printed


def test_nothing_fits_is_said_on_a_line_of_its_own(tmp_path, volumes, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ("--data", volumes, "--budget-gb", "0.1", *SMALL, "data.voxel_size=[16,16,16]")
    assert run_here("scripts/plan.py", *given) == 3
    assert re.search(r"(?m)^error: --budget-gb: nothing fits 0\.1 GiB", capsys.readouterr().err)


def test_sections_that_are_given_count_as_their_keys():
    options = plan.parse(["--data", "d", "--budget-gb", "8", "data.intensity={mode: window, upper: 5}"])
    assert plan._check(options) == {"data.intensity.mode": "window", "data.intensity.upper": 5}
    with pytest.raises(ConfigError, match=r"data\.source: given besides"):
        plan._check(plan.parse(["--data", "d", "--budget-gb", "8", "data={source: d}"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget-gb", "-3"), "'-3' is not a finite number above 0"),
        (("--budget-gb", "8", "--gpu", "abacus"), "--gpu: found 'abacus'"),
        (("--budget-gb", "8", "--hours", "-1"), "is not a finite number above 0"),
        (("--budget-gb", "8", "--out", "configs"), "--out: configs is not a file that can be overwritten"),
        (("--budget-gb", "8", "data.voxel_sise=[8,8,8]"), "unknown key; did you mean data.voxel_size?"),
        (("--budget-gb", "8", "data.voxel_size=large"), "data.voxel_size: found 'large'"),
        (("--budget-gb", "8", "data.source=elsewhere"), "data.source: given besides --data"),
        (("--budget-gb", "8", "--data", ""), "--data: the path is empty"),
        (("--budget-gb", "8", "--out", "plan.txt"), "--out: plan.txt is not the name of a config"),
        (("--budget-gb", "8", "--out", "other.yaml"), "--out: other.yaml already exists and was not written by plan"),
        (("--budget-gb", "8", "--out", "nowhere/0.yaml"), "--out: nowhere/0.yaml lies in the folder of the volumes"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "other.yaml").write_text("name: other\n")
    assert run_here("scripts/plan.py", "--data", "nowhere", *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == ["configs", "nowhere", "other.yaml"], "nothing was written"


def test_volumes_that_do_not_fit_are_refused(tmp_path, volumes, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["scripts/plan.py", "--budget-gb", "8", *SMALL]
    assert run_here(*command, "--data", volumes, "autoencoder.in_channels=3") == 2
    assert "1 channel (18 x 16 x 17); autoencoder.in_channels is 3; change one of the two" in capsys.readouterr().err
    shutil.rmtree(volumes)
    assert run_here(*command, "--data", tmp_path) == 2
    assert "holds no volume" in capsys.readouterr().err
