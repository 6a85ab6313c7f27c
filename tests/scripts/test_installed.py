"""`pip install -e .` installs the command `lean3d` and nothing with a generic name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import build_meta

from scripts.installed import lean3d

ROOT = Path(__file__).resolve().parents[2]


def lean3d_command(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(program), *arguments], cwd=cwd, capture_output=True, text=True)


def test_commands_run_from_another_folder(tmp_path):
    program = Path(lean3d.__file__)
    listed = lean3d_command(program, cwd=tmp_path)
    assert listed.returncode == 0
    names = [path.stem for path in sorted((ROOT / "scripts").glob("*.py"))]
    assert [line.split()[0] for line in listed.stdout.splitlines()[2:]] == ["train_autoencoder", "train_ldm", *names]
    config = str(ROOT / "configs" / "default.yaml")
    printed = lean3d_command(program, "train_autoencoder", "--config", config, "--print-config", cwd=tmp_path)
    assert printed.returncode == 0
    assert "name: default" in printed.stdout
    wrong = lean3d_command(program, "smaple", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "'smaple': no such command; allowed: train_autoencoder, " in wrong.stderr


def test_the_module_without_the_clone_says_how_to_install(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    copy = shutil.copy(lean3d.__file__, tmp_path / "a" / "b" / "lean3d.py")
    done = lean3d_command(Path(copy), "sample", cwd=tmp_path)
    assert done.returncode == 2
    assert "install its clone with pip install -e ." in done.stderr


def test_an_editable_install_puts_only_one_module_on_the_path(tmp_path, monkeypatch):
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "scripts" / "installed", tmp_path / "scripts" / "installed")
    monkeypatch.chdir(tmp_path)
    shutil.unpack_archive(build_meta.build_editable(str(tmp_path)), tmp_path / "wheel", "zip")
    folders = [line for path in (tmp_path / "wheel").glob("*.pth") for line in path.read_text().split()]
    assert [path.name for folder in folders for path in Path(folder).glob("*.py")] == ["lean3d.py"]
    metadata = next((tmp_path / "wheel").glob("*.dist-info"))
    assert "lean3d = lean3d:main" in (metadata / "entry_points.txt").read_text()
    assert "Requires-Dist: monai==" in (metadata / "METADATA").read_text()
