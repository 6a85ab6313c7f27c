"""`scripts/check_gpu.sh` refuses machines without a CUDA device in one sentence; others it measures and tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from evaluation.gpu_check import parse
from tests.conftest import pytest_runtest_setup

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


TESTS = ["-m", "pytest", "-m", "gpu", "tests/gpu", "tests/models/lean/norm/test_norm_gpu.py"]


def test_with_a_gpu_it_measures_and_runs_the_tests_that_need_one(project):
    done = check_gpu(project, True)
    assert done.returncode == 0, done.stderr
    *_, measurement, tests = (line.split() for line in (project / "asked").read_text().splitlines())
    assert tests[:-1] == [*TESTS, "--seconds"]
    assert all((ROOT / word).exists() for word in tests if word.startswith("tests/"))
    options = parse(measurement[2:])
    assert measurement[:2] == ["-m", "evaluation.gpu_check"]
    assert options.seconds <= 200
    assert 200 <= int(tests[-1]) <= 270, "of 300, and the measurement took none here"
    assert options.out == "check_gpu.md"


def test_no_test_begins_after_the_limit_of_time(pytestconfig, request, monkeypatch):
    monkeypatch.setattr(pytestconfig.option, "seconds", 1e9)
    pytest_runtest_setup(request.node)
    monkeypatch.setattr(pytestconfig.option, "seconds", 0.0)
    with pytest.raises(pytest.skip.Exception, match="not begun within 0 s"):
        pytest_runtest_setup(request.node)


def test_with_arguments_it_runs_only_tests(project):
    done = check_gpu(project, True, "-k", "gradients")
    assert done.returncode == 0, done.stderr
    asked = [line.split() for line in (project / "asked").read_text().splitlines()]
    assert asked[-1] == [*TESTS, "-k", "gradients"]
    assert not any("evaluation.gpu_check" in words for words in asked)


def test_every_test_that_needs_a_gpu_is_run_by_it():
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    ours = [path.relative_to(ROOT).as_posix() for path in marked if path != Path(__file__).resolve()]
    script = (ROOT / "scripts" / "check_gpu.sh").read_text()
    assert len(ours) > 3
    assert all(path.startswith("tests/gpu/") or path in script for path in ours), ours
