"""The shape of the project: who imports whom, how long files are, and that no drawer without a label appears."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ARROWS: list[tuple[str, ...]] = [
    ("storage",),
    ("settings",),
    ("command_line",),
    ("models", "losses", "data", "runtime"),
    ("diffusion",),
    ("training",),
    ("memory", "evaluation"),
    ("report",),
    ("benchmarks",),
    ("scripts",),
    ("dev",),
    ("tests",),
]
"""Every room may import from the rooms above it; the rooms of one line know nothing of each other."""
TRAIN_SCRIPTS = {"train_autoencoder", "train_ldm"}
PACKAGES = tuple(room for line in ARROWS for room in line)
MAY_IMPORT = {
    room: {earlier for line in ARROWS[:number] for earlier in line} | (TRAIN_SCRIPTS if room == "tests" else set())
    for number, line in enumerate(ARROWS)
    for room in line
}
WITHIN = {"memory": [("predict",), ("ladder",), ("watch",)], "models": [("lean",), ("",), ("exchange",)]}
"""The same inside of two rooms; "" stands for the files at the top of the room."""
NO_TORCH = ("storage", "settings", "command_line")
SOURCES = sorted(p for p in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")) if p.relative_to(ROOT).parts[0] != "runs")
CODE = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]


def package_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first if first in PACKAGES else "scripts"  # the train scripts stand where the scripts stand


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    package = package_of(path)
    ours = imported(path) & {*PACKAGES, *TRAIN_SCRIPTS}
    assert ours <= MAY_IMPORT[package] | {package}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_readable(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 75, f"{node.name} asks to be two"


@pytest.mark.parametrize("name", ["train_autoencoder.py", "train_ldm.py"])
def test_train_scripts_read_like_prose(name):
    assert len((ROOT / name).read_text().splitlines()) <= 125


def test_there_are_no_drawers_without_a_label():
    drawers = {"utils", "helpers", "misc", "common"}
    assert [p for p in SOURCES if p.stem in drawers or drawers & set(p.relative_to(ROOT).parts)] == []


def test_git_ignores_no_code():
    files = [str(path.relative_to(ROOT)) for path in SOURCES]
    done = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""
