"""The shape of the project: who imports whom, where torch may be imported, and that no module is called utils."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARROWS: list[tuple[str, ...]] = [
    ("runtime.files",),
    ("settings",),
    ("runtime.cli",),
    ("runtime",),
    ("models.lean", "losses", "data"),
    ("models",),
    ("models.exchange",),
    ("diffusion",),
    ("training",),
    ("training.validation",),
    ("memory", "memory.kernels"),
    ("memory.predict",),
    ("memory.ladder",),
    ("memory.watch",),
    ("memory.planning",),
    ("evaluation",),
    ("evaluation.report",),
    ("evaluation.benchmarks",),
    ("scripts", "train_autoencoder", "train_ldm"),
    ("scripts.dev",),
    ("tests",),
]
"""Each may import those of the lines above it. Those of one line do not import each other."""
SIDEWAYS = {("models", "losses"), ("models", "data"), ("models.exchange", "losses"), ("models.exchange", "data")}
"""Networks know neither losses nor volumes, although their room stands on a later line."""
NO_TORCH = ("runtime.files", "settings", "runtime.cli")
LINE = {part: number for number, parts in enumerate(ARROWS) for part in parts}
SOURCES = sorted(
    path
    for path in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py"))
    if path.relative_to(ROOT).parts[0] not in ("runs", "docs")  # examples in docs/ import nothing of ours
)


def part_of(module: str) -> str | None:
    """Return the room, or the part of a room, that a dotted name belongs to: the longest of `ARROWS` that fits."""
    words = module.split(".")
    return next((name for n in (2, 1) if (name := ".".join(words[:n])) in LINE), None)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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
            # An imported name may be a part of a room or something inside the module, so count both.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def against_the_arrows(part: str, source: str) -> set[str]:
    """Return what a file of `part` imports and must not."""
    imported = {name for name in map(part_of, imported_modules(source)) if name is not None} - {part}
    return {name for name in imported if LINE[name] >= LINE[part] or (part, name) in SIDEWAYS}


def test_imports_follow_the_arrows():
    parts = {path: part_of(module_of(path)) for path in SOURCES}
    assert [str(path) for path, part in parts.items() if part is None] == [], "a room without arrows"
    assert set(parts.values()) == set(LINE)
    wrong = {
        str(path.relative_to(ROOT)): against_the_arrows(part, path.read_text())
        for path, part in parts.items()
        # models/__init__.py gathers what the room offers, from all its parts.
        if part is not None and path != ROOT / "models" / "__init__.py"
    }
    assert {path: names for path, names in wrong.items() if names} == {}


def test_what_checks_input_imports_neither_torch_nor_monai():
    """Not even inside a function: a wrong config is reported before anything slow is imported."""
    paths = [path for path in SOURCES if part_of(module_of(path)) in NO_TORCH]
    assert {part_of(module_of(path)) for path in paths} == set(NO_TORCH)
    slow = {"torch", "monai"}
    assert [p for p in paths if slow & {name.split(".")[0] for name in imported_modules(p.read_text())}] == []


def test_folders_at_the_top_and_lines_of_the_train_scripts_are_few_and_no_name_is_vague():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {line.split("/")[0] for line in tracked.splitlines() if "/" in line and not line.startswith(".")}
    assert len(folders) <= 13, sorted(folders)
    for name in ("train_autoencoder.py", "train_ldm.py"):
        assert len((ROOT / name).read_text().splitlines()) <= 90
    vague = {"utils", "helpers", "misc", "common"}
    assert [p for p in SOURCES if p.stem in vague or vague & set(p.relative_to(ROOT).parts)] == []
    files = [str(path.relative_to(ROOT)) for path in SOURCES]
    ignored = subprocess.run(["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == "", "git ignores code"
