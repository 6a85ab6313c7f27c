"""The shell scripts find a supported Python, or say that there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "dirname", "grep", "rm", "sha256sum", "tail")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the scripts and requirements, beside a `bin` with a few tools and no Python."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for path in ROOT.glob("requirements*.txt"):
        shutil.copy(path, tmp_path)
    return tmp_path


def set_up_with(project: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    """Source environment.sh where only this Python is found."""
    path = project / "bin" / name
    path.write_text(f"#!{project}/bin/bash\n{text}\n")
    path.chmod(0o755)
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
