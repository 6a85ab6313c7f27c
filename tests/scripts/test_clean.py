"""scripts/clean.py deletes what no run needs, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.files import RunFolder
from tests.conftest import ROOT
from tests.finished_run import finished_run, run_here

OLD, OLDER = f"prepared/{'0a' * 12}", f"latents/{'1b' * 12}"


@pytest.fixture
def runs(tmp_path, tmp_path_factory, monkeypatch):
    """The runs/ folder of a finished run, with two caches that no run has used, and all of it a day old."""
    runs = shutil.copytree(finished_run(tmp_path_factory).parent, tmp_path / "runs")
    for name in (OLD, OLDER):
        (runs / name).mkdir()
        (runs / name / "volume").write_bytes(bytes(3000))
    for path in runs.rglob("*"):
        os.utime(path, (time.time() - 86400,) * 2)
    monkeypatch.chdir(tmp_path)
    return runs


def caches(runs: Path) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for name in ("prepared", "latents") for path in (runs / name).iterdir()}


def test_what_a_run_uses_is_listed_and_stays_and_the_rest_goes_when_asked(runs, capsys):
    used = RunFolder(runs / "tiny").known_caches()
    assert used is not None
    assert {name.split("/")[0] for name in used} == {"prepared", "latents"}
    before = caches(runs)
    assert run_here("scripts/clean.py") == 0
    said = capsys.readouterr().out
    assert caches(runs) == before, "without --yes, and nobody to ask"
    assert said.count("used by tiny") == len(used & before)
    assert said.count("no run needs it") == 2
    assert "nothing was deleted; --yes deletes 2 folders, 0.01 MiB" in said
    assert run_here("scripts/clean.py", "--yes") == 0
    assert caches(runs) == before - {OLD, OLDER}
    assert run_here("scripts/clean.py", "--yes") == 0
    assert "nothing to delete" in capsys.readouterr().out


def test_folders_and_links_of_others_stay(runs, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (runs / "prepared" / ("2c" * 12)).symlink_to(tmp_path / "elsewhere")
    for name in ("prepared/thesis", f"latents/{'3d' * 12}/nested"):
        (runs / name).mkdir(parents=True)
    before = caches(runs)
    assert run_here("scripts/clean.py", "--yes") == 0
    assert caches(runs) == before - {OLD, OLDER}
    assert capsys.readouterr().out.count("kept: it is not a cache of this program") == 3


def test_what_may_be_needed_stays(runs, capsys):
    (runs / OLD / "volume").touch()
    (runs / "tiny/caches.txt").write_bytes(b"\xff\xfe")
    assert run_here("scripts/clean.py", "--yes") == 0
    said = capsys.readouterr().out
    assert (runs / OLD).exists()
    assert (runs / OLDER).exists()
    assert "kept: written within the last hour" in said
    assert "kept: tiny does not say what it uses" in said


def test_the_environment_chooses_where_runs_are(tmp_path):
    (tmp_path / "elsewhere" / "prepared").mkdir(parents=True)
    environment = {**os.environ, "LEAN3D_RUNS": str(tmp_path / "elsewhere")}
    command = [sys.executable, str(ROOT / "scripts/clean.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "nothing to delete\n")
    missing = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert missing.returncode == 2
    assert "set LEAN3D_RUNS to their folder" in missing.stderr
