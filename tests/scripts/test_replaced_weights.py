"""scripts/import_checkpoint.py replaces weights that were imported, and never those that a run trained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.finished_run import finished_run, run_here
from training.checkpoints import Checkpoints

SCRIPT = "scripts/import_checkpoint.py"


def test_imported_weights_may_be_replaced_and_trained_ones_may_not(tmp_path, tmp_path_factory, capsys):
    run = shutil.copytree(finished_run(tmp_path_factory), tmp_path / "run")
    trained = run / "autoencoder.safetensors"
    origin = ["--from", "monai", "--weights", trained, "--config", run / "config.yaml", "--out"]
    for _ in range(2):
        assert run_here(SCRIPT, *origin, tmp_path / "new") == 0
    before = trained.read_bytes()
    assert run_here(SCRIPT, *origin, run) == 2
    assert "autoencoder.safetensors: was trained here; only imported weights are replaced" in capsys.readouterr().err
    assert trained.read_bytes() == before
    # A run that is not finished has checkpoints only.
    Checkpoints(tmp_path / "new" / "checkpoints", "autoencoder", 2).save(3, {})
    assert run_here(SCRIPT, *origin, tmp_path / "new") == 2
    assert "was trained here; only imported weights are replaced" in capsys.readouterr().err


def test_a_run_in_use_is_left_alone(tmp_path, tmp_path_factory, capsys):
    run, out = finished_run(tmp_path_factory), tmp_path / "new"
    holder = (
        "import time; from pathlib import Path; from runtime.files.run_folder import RunFolder\n"
        "from training.run_setup import locked\n"
        f"with locked(RunFolder(Path({str(out)!r}))):\n    print('held', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", holder], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            weights: list[str | Path] = ["--weights", run / "autoencoder.safetensors", "--config", run / "config.yaml"]
            assert run_here(SCRIPT, "--from", "monai", *weights, "--out", out) == 2
            assert "in use by another process" in capsys.readouterr().err
            assert not (out / "autoencoder.safetensors").exists()
        finally:
            process.kill()
