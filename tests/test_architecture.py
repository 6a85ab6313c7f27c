"""The shape of the project: who imports whom, how long files and packages are, and that no module is called utils."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
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
    ("evaluation",),
    ("memory",),
    ("planning",),
    ("report",),
    ("benchmarks",),
    ("scripts",),
    ("dev",),
    ("tests",),
]
"""Every room may import from the rooms above it; the rooms of one line do not import each other."""
TRAIN_SCRIPTS = {"train_autoencoder", "train_ldm"}
PACKAGES = tuple(room for line in ARROWS for room in line)
MAY_IMPORT = {
    room: {earlier for line in ARROWS[:number] for earlier in line} | (TRAIN_SCRIPTS if room == "tests" else set())
    for number, line in enumerate(ARROWS)
    for room in line
}
WITHIN = {"memory": ("kernels", "predict", "ladder", "watch"), "models": ("lean", "", "exchange")}
"""The same inside two rooms; "" stands for the files at the top of the room."""
NO_TORCH = ("storage", "settings", "command_line")
SOURCES = sorted(p for p in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")) if p.relative_to(ROOT).parts[0] != "runs")
CODE = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]


MOST_MODULES = 12


def package_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    if first.removesuffix(".py") in TRAIN_SCRIPTS:
        return "scripts"
    assert first in PACKAGES, f"{first} is a room without arrows; add it to ARROWS and to docs/architecture.md"
    return first


def imported_modules(source: str) -> set[str]:
    """Return the dotted names of everything that a file imports, anywhere in it, also by calling an import function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name = node.args[0]
            assert isinstance(name, ast.Constant), f"{ast.unparse(node)} hides who imports whom"
            names.add(str(name.value))
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            # An imported name may be a module or something inside one, so count both.
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imported_packages(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(source)}


def against_the_arrows(package: str, source: str) -> set[str]:
    """Return the rooms and train scripts that a file of a package imports and must not."""
    return (imported_packages(source) & {*PACKAGES, *TRAIN_SCRIPTS}) - MAY_IMPORT[package] - {package}


def against_the_arrows_within(room: str, part: str, source: str) -> set[str]:
    """Return what a file in one part of a room imports from the parts after it."""
    later = WITHIN[room][WITHIN[room].index(part) + 1 :]
    forbidden = {f"{room}.{name}" for name in later if name}
    if "" in later:
        forbidden |= {f"{room}.{path.stem}" for path in (ROOT / room).glob("*.py")}
    names = imported_modules(source)
    wrong = {name for name in names if ".".join(name.split(".")[:2]) in forbidden}
    return wrong | (names & {room} if "" in later else set())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    assert against_the_arrows(package_of(path), path.read_text()) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import training.loop",
        "from training import loop",
        "from training.loop import run_loop as run",
        "def f():\n    from training import loop",
        "if TYPE_CHECKING:\n    from training.loop import Watch",
        "importlib.import_module('training.loop')",
        "from importlib import import_module\nimport_module('training')",
        "__import__('training')",
        "from train_ldm import train",
    ],
)
def test_imports_against_the_arrows_are_noticed(source):
    assert against_the_arrows("storage", source)
    assert against_the_arrows("diffusion", source)
    assert not against_the_arrows("tests", source)


def test_imports_that_hide_what_they_import_are_noticed():
    for source in ("from . import loop", "importlib.import_module(f'training.{name}')"):
        with pytest.raises(AssertionError, match="who imports whom"):
            imported_modules(source)


def test_rooms_of_one_line_do_not_import_each_other():
    assert against_the_arrows("losses", "from models import build_unet") == {"models"}


def test_every_file_with_code_is_in_a_room():
    with pytest.raises(AssertionError, match="a room without arrows"):
        package_of(ROOT / "tools" / "plot.py")
    assert {package_of(path) for path in SOURCES} == set(PACKAGES)


@pytest.mark.parametrize("room", WITHIN)
def test_imports_within_a_room_follow_its_arrows(room):
    folders = {path.name for path in (ROOT / room).iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == {part for part in WITHIN[room] if part}
    wrong = {}
    for path in (path for path in CODE if package_of(path) == room):
        part = path.relative_to(ROOT / room).parts[0] if path.parent != ROOT / room else ""
        # A room's __init__ gathers what the room offers, from all its parts.
        if part in WITHIN[room] and path != ROOT / room / "__init__.py":
            wrong[str(path.relative_to(ROOT))] = against_the_arrows_within(room, part, path.read_text())
    assert len(wrong) > 10
    assert {path: names for path, names in wrong.items() if names} == {}


def test_imports_against_the_arrows_within_a_room_are_noticed():
    assert against_the_arrows_within("memory", "predict", "from memory.ladder import walk")
    assert against_the_arrows_within("memory", "predict", "def f():\n    from memory import watch")
    assert against_the_arrows_within("models", "lean", "import models.unet")
    assert against_the_arrows_within("models", "lean", "import models")
    assert against_the_arrows_within("models", "", "from models.exchange.weights import load")
    assert not against_the_arrows_within("memory", "watch", "from memory.predict.prediction import Stage")
    assert not against_the_arrows_within("models", "lean", "from models.lean import native")


@pytest.mark.parametrize("room", NO_TORCH)
def test_rooms_that_check_input_import_neither_torch_nor_monai(room):
    """Not even inside a function: a wrong config is reported before anything slow is imported."""
    paths = [path for path in CODE if package_of(path) == room]
    assert paths
    assert [
        str(path.relative_to(ROOT)) for path in paths if imported_packages(path.read_text()) & {"torch", "monai"}
    ] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 75, f"{node.name} is too long; split it"


def test_no_folder_holds_more_code_than_fits_on_a_screen():
    modules = Counter(path.parent for path in CODE if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in modules.items() if n > MOST_MODULES} == {}


@pytest.mark.parametrize("name", ["train_autoencoder.py", "train_ldm.py"])
def test_train_scripts_stay_below_90_lines(name):
    assert len((ROOT / name).read_text().splitlines()) < 90


def test_no_module_is_called_utils_or_helpers():
    vague = {"utils", "helpers", "misc", "common"}
    assert [p for p in SOURCES if p.stem in vague or vague & set(p.relative_to(ROOT).parts)] == []


def test_git_ignores_no_code():
    files = [str(path.relative_to(ROOT)) for path in SOURCES]
    done = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""
