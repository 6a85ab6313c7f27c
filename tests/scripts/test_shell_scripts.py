"""The shell scripts: a supported Python is found or missed, quickstart.sh samples its run, check_gpu.sh needs a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from evaluation.gpu_check import parse
from tests.conftest import ROOT, pytest_runtest_setup


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the scripts and requirements."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, tmp_path)
    return tmp_path


def write_program(path: Path, *lines: str, shell: str = "/usr/bin/env bash") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f"#!{shell}", *lines, ""]))
    path.chmod(0o755)


def set_up_with(project: Path, name: str, line: str) -> subprocess.CompletedProcess[str]:
    """Source environment.sh where only this Python is found, beside a few tools."""
    write_program(project / "bin" / name, line, shell=f"{project}/bin/bash")
    for tool in ("bash", "cat", "dirname", "grep", "rm", "sha256sum", "tail"):
        (project / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    command = ["bash", "-c", "source scripts/environment.sh requirements.txt"]
    environment = {"PATH": str(project / "bin"), "HOME": str(project)}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=300)


def test_without_a_supported_python_the_supported_ones_are_named(project):
    done = set_up_with(project, "python3", '[ "$1" = --version ] && echo "Python 3.10.1" || exit 1')
    assert done.returncode == 2
    assert "error: found Python 3.10.1; Python 3.11, 3.12 or 3.13 is needed; install one" in done.stderr


@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_a_supported_python_is_accepted(project, version):
    set_up_with(project, f"python{version}", 'echo "$@" >> asked; [ "$1" = -c ]')
    assert (project / "asked").read_text().splitlines()[-1] == "-m venv .venv"


def write_environment(project: Path, *first: str) -> None:
    """Write an environment whose Python only notes what it is asked for."""
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    write_program(project / ".venv" / "bin" / "python", *first, 'printf "%s " "$@" >> asked; echo >> asked')


@pytest.mark.parametrize(
    ("runs", "words", "run"),
    [
        ("", (), "runs/quickstart"),
        ("/elsewhere", ("seed=1",), "/elsewhere/quickstart"),
        ("", ("name=mine",), "runs/mine"),
    ],
)
def test_the_quickstart_samples_the_run_that_it_trained(project, runs, words, run):
    write_environment(project)
    command, environment = ["bash", "scripts/quickstart.sh", *words], {**os.environ, "LEAN3D_RUNS": runs}
    subprocess.run(command, cwd=project, env=environment, check=True, timeout=60)
    *_, first, second, sampling = ((project / "asked").read_text()).splitlines()
    assert [first.split()[3:], second.split()[3:]] == [[*words]] * 2
    assert sampling.split() == ["scripts/sample.py", "--run", run, "--num", "4", "--out", f"{run}/samples"]


def check_gpu(project: Path, has_gpu: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run check_gpu.sh in an environment whose Python only notes what it is asked for."""
    write_environment(project, f'[ "$1" = -c ] && {{ echo 2.13.0; exit {int(not has_gpu)}; }}')
    command = ["bash", str(project / "scripts" / "check_gpu.sh"), *arguments]
    return subprocess.run(command, cwd=project.parent, capture_output=True, text=True, timeout=60)


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
