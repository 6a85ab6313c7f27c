"""`scripts/check_gpu.sh` refuses machines without a CUDA device in one sentence, and runs the GPU tests on others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the scripts with an environment whose Python only notes what it is asked for."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    return tmp_path


def check_gpu(project: Path, has_gpu: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    python = project / ".venv" / "bin" / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        f'[ "$1" = -c ] && {{ echo 2.13.0; exit {int(not has_gpu)}; }}\n'
        'printf "%s " "$@" >> asked; echo >> asked\n'
    )
    python.chmod(0o755)
    return subprocess.run(
        ["bash", str(project / "scripts" / "check_gpu.sh"), *arguments],
        cwd=project.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_a_gpu_it_says_so_in_one_sentence(project):
    done = check_gpu(project, False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: torch 2.13.0 sees no CUDA device; this check needs one; ")
    assert "pytest" not in (project / "asked").read_text()


def test_with_a_gpu_it_runs_the_tests_that_need_one(project):
    done = check_gpu(project, True, "-k", "peak")
    assert done.returncode == 0, done.stderr
    command = (project / "asked").read_text().splitlines()[-1].split()
    assert command == [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "tests/models/lean/norm/test_norm_gpu.py",
        "-k",
        "peak",
    ]
    assert all((ROOT / word).exists() for word in command if word.startswith("tests/"))


def test_every_test_that_needs_a_gpu_is_run_by_it():
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    ours = [path.relative_to(ROOT).as_posix() for path in marked if path != Path(__file__).resolve()]
    script = (ROOT / "scripts" / "check_gpu.sh").read_text()
    assert len(ours) > 4
    assert all(path.startswith("tests/gpu/") or path in script for path in ours), ours
