"""check_data reports every volume and every problem, for every source."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.formats import write_nifti

ROOT = Path(__file__).resolve().parents[2]


ARGUMENTS = [str(ROOT / "scripts/check_data.py"), "--config", str(ROOT / "configs/quickstart.yaml")]


def check(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *ARGUMENTS, *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def check_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command in this process, which has imported torch already, and return its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> int:
        monkeypatch.setattr(sys, "argv", [*ARGUMENTS, *overrides])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(ARGUMENTS[0], run_name="__main__")
        assert isinstance(end.value.code, int)
        return end.value.code

    return run


def write_volumes(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("ill/a", "ill/b", "well/c"):
        write_nifti(folder / f"{name}.nii.gz", rng.normal(100, 20, (1, 10, 12, 14)).astype(np.float32), np.eye(4))


def test_good_volumes_are_listed_with_a_summary(
    check_here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_volumes(tmp_path / "volumes")
    assert check_here("data.source=volumes") == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].split()[:3] == ["volume", "class", "shape"]
    assert lines[1].split()[:4] == ["ill/a.nii.gz", "ill", "10x12x14", "1x1x1"]
    assert "3 volumes, no problem" in output.out
    assert "classes: ill (2), well (1)" in output.out
    assert "checking volumes" in output.err


def test_every_problem_is_listed_and_the_exit_code_is_2(tmp_path: Path) -> None:
    write_volumes(tmp_path / "volumes")
    (tmp_path / "volumes/ill/a.nii.gz").write_text("text")
    np.save(tmp_path / "volumes/well/flat.npy", np.ones((4, 4, 4)))
    (tmp_path / "volumes/dataset.json").write_text(
        json.dumps({"training": ["ill/a.nii.gz", "well/c.nii.gz", "well/flat.npy", "well/gone.nii"]})
    )
    result = check(tmp_path, "data.source=volumes/dataset.json")
    assert result.returncode == 2
    assert "3 problems in 4 volumes" in result.stdout
    assert "ill/a.nii.gz: not a .nii.gz file" in result.stdout
    assert "well/flat.npy: channel 0 is 1 at both" in result.stdout
    assert "well/gone.nii: no such file" in result.stdout
    assert "Traceback" not in result.stderr


def test_phantoms_are_checked_too(check_here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_here("data.source=phantoms", "data.num_phantoms=4") == 0
    assert "4 volumes, no problem" in capsys.readouterr().out


def test_a_missing_source_is_said_in_words(check_here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert check_here("data.source=nowhere") == 2
    assert "data.source: nowhere does not exist" in capsys.readouterr().err


def test_findings_are_written_as_json(check_here: Callable[..., int], tmp_path: Path) -> None:
    write_volumes(tmp_path / "volumes")
    nothing = np.full((1, 10, 12, 14), np.nan, np.float32)
    write_nifti(tmp_path / "volumes/well/d.nii.gz", nothing, np.eye(4))
    (tmp_path / "volumes/ill/b.nii.gz").write_text("text")
    assert check_here("data.source=volumes", "--json", "new/checks.json") == 2

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    values = json.loads((tmp_path / "new/checks.json").read_text(), parse_constant=refuse)
    first, second, _, last = values["volumes"]
    assert (first["volume"], first["class"], first["shape"]) == ("ill/a.nii.gz", "ill", [10, 12, 14])
    assert first["problems"] == []
    assert "not a .nii.gz file" in second["problems"][0]
    assert last["minimum"] is None
    assert len(values["problems"]) == 2


@pytest.mark.parametrize("target", ["", "volumes/ill/a.nii.gz/x", "volumes", "x" * 300])
def test_impossible_output_is_refused_before_the_volumes_are_read(
    check_here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    write_volumes(tmp_path / "volumes")
    assert check_here("data.source=volumes", "--json", target) == 2
    output = capsys.readouterr()
    assert "error: --json: " in output.err
    assert output.out == ""


def test_names_that_no_encoding_has_are_escaped_where_output_is_strict(tmp_path: Path) -> None:
    write_volumes(tmp_path / "volumes")
    strange = os.fsencode(tmp_path) + b"/volumes/ill/\xff\xe4.nii.gz"
    os.rename(tmp_path / "volumes/ill/a.nii.gz", strange)
    os.rename(tmp_path / "volumes/well", os.fsencode(tmp_path) + b"/volumes/well\xf6")
    (tmp_path / "labels.csv").write_bytes(b"file,label\nc.nii.gz,caf\xc3\xa9\nb.nii.gz,1\n")
    for overrides in (["data.labels=labels.csv"], []):
        result = subprocess.run(
            [sys.executable, *ARGUMENTS, "data.source=volumes", "--json", "checks.json", *overrides],
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == (2 if overrides else 0), result.stderr
        assert b"Traceback" not in result.stderr
        assert rb"ill/\udcff\udce4.nii.gz" in result.stdout
    names = [volume["volume"] for volume in json.loads((tmp_path / "checks.json").read_text())["volumes"]]
    assert os.fsdecode(b"ill/\xff\xe4.nii.gz") in names


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['check_data', '--help']\ntry: runpy.run_path(path, run_name='__main__')\n"
    code = f"import runpy; path = {str(ROOT / 'scripts/check_data.py')!r}\n{code}except SystemExit: pass\n"
    code += "sys.exit(3 if {'torch', 'monai'} & set(sys.modules) else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "section.key=value" in result.stdout
