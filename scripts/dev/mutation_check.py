"""Seed faults one at a time into a copy of the tree and see whether the tests notice.

python scripts/dev/mutation_check.py --out docs/mutations.md

Each result is kept in `docs/mutations.json` as soon as it is known, until the fault or the code of its file or tests
changes. An interrupted run therefore continues where it stopped; `--only` runs a part.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import multiprocessing
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
RESULTS = ROOT / "docs" / "mutations.json"
SURVIVED, UNUSABLE = 1, 2
TEST_SECONDS = 120  # a fault may make a test wait for ever
PASSED, FAILED, NOT_FOUND = 0, 1, 4  # pytest's own codes; those above 1 mean that the tests did not run


# The slow imports are done once, in the process from which all tests are forked.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("pytest", "hypothesis", "pytest_timeout", "xdist", "pydantic.main", "pydantic.fields", "nibabel"),
        *("safetensors.torch", "scipy.ndimage", "scipy.sparse", "torch.distributed", "torch.utils.checkpoint"),
        *("torch.utils.tensorboard", "torch._subclasses.fake_tensor"),
        *("monai.networks.nets", "monai.networks.schedulers", "monai.metrics"),
    ]
)


class CheckError(Exception):
    """The check itself cannot be made: a stale fault, or tests that fail without one."""


@dataclass(frozen=True)
class Fault:
    """One wrong piece of text, and the tests that ought to notice it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def seeded(self, text: str) -> str:
        """Return the file's text with the fault in it; raise `CheckError` unless it fits in exactly one place."""
        if (found := text.count(self.right)) != 1:
            raise CheckError(f"{self.file}: the text of the fault {self.name!r} occurs {found} times; must be once")
        changed = text.replace(self.right, self.wrong)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise CheckError(f"{self.file}: with the fault {self.name!r} it is not Python ({error})") from None
        return changed

    def key(self) -> str:
        """Return a hash of the fault and of the code of its file and tests: all that a result directly depends on."""
        files = [self.file, *(name.split("::")[0] for test in self.tests for name in named_files(ROOT, test))]
        parts = [self.name, self.right, self.wrong, *self.tests]
        parts += [text for name in files for text in (name, _code_of((ROOT / name).read_text(encoding="utf-8")))]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def change(self) -> str:
        """Return the lines that differ, as Markdown."""
        right, wrong = ([line.strip() for line in text.strip().splitlines()] for text in (self.right, self.wrong))
        gone = [line for line in right if line not in wrong]
        new = [line for line in wrong if line not in right]
        return f"{_code(gone)} → {_code(new)}"


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a fault: the one that failed first, or None."""

    fault: Fault
    caught_by: str | None
    seconds: float


@functools.cache
def _code_of(source: str) -> str:
    """Return Python source without comments, docstrings and layout, so that rewording a file keeps its results."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_text(part)]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def named_files(folder: Path, test: str) -> list[str]:
    """Return the test files that match a path, which may contain `*`; a test named after `::` is kept."""
    path, *inside = test.split("::")
    return ["::".join([str(file.relative_to(folder)), *inside]) for file in sorted(folder.glob(path))]


def _run_tests(folder: Path, tests: Sequence[str], output: Path) -> None:
    """Run tests in a copy of the tree, in a fork that has not imported any of the project."""
    import pytest

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.dont_write_bytecode = False  # overrides the environment: most files are the same in the next run
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={folder}-tests"]
    code = pytest.main([*options, f"--timeout={TEST_SECONDS}", *tests])
    sys.stdout.flush()
    os._exit(code)


def load_faults() -> list[Fault]:
    """Return all faults; their names are unique."""
    files = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["files"]
    faults = [
        Fault(f["name"], file["path"], f["right"], f["wrong"], tuple(f.get("tests", file["tests"])))
        for file in files
        for f in file["faults"]
    ]
    names = [fault.name for fault in faults]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise CheckError(f"{FAULTS}: several faults are called {', '.join(sorted(doubled))}")
    return faults


class Tree:
    """A copy of the tracked files, in which tests run; the work tree itself is never changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time = int(time.time())
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(ROOT / ".venv")

    def run(self, tests: Sequence[str]) -> str | None:
        """Run tests up to the first that fails and return its name; None when all pass.

        Raise `LookupError` if there are no such tests, and `CheckError` if they do not run to their end.
        """
        output = self.folder.with_suffix(".txt")
        paths = [path for test in tests for path in named_files(self.folder, test) or [test]]
        process = FORKS.Process(target=_run_tests, args=(self.folder, paths, output))
        process.start()
        process.join()
        if process.exitcode == PASSED:
            return None
        text = output.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
        if process.exitcode == NOT_FOUND:
            raise LookupError(f"{' '.join(tests)}: there are no such tests:\n{text[-3000:]}")
        if process.exitcode != FAILED or failed is None:
            code = process.exitcode
            raise CheckError(f"{' '.join(tests)}: the tests did not run to their end (code {code}):\n{text[-3000:]}")
        return failed[1]

    def meet(self, fault: Fault) -> Outcome:
        """Run a fault's tests with the fault in place."""
        path, start = self.folder / fault.file, time.monotonic()
        text = path.read_text(encoding="utf-8")
        self._write(path, fault.seeded(text))
        try:
            caught_by = self.run(fault.tests)
        finally:
            self._write(path, text)
        return Outcome(fault, caught_by, time.monotonic() - start)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python recognises stale bytecode by a file's length and time in seconds, so each version gets a new time.
        self.time += 1
        os.utime(path, (self.time, self.time))


class Results:
    """The outcomes of this and earlier runs, in a file; those of faults that have changed since do not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def _read(self) -> dict[str, dict[str, Any]]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def of(self, faults: Sequence[Fault]) -> dict[str, Outcome]:
        """Return the outcomes that still hold, by name of the fault."""
        known = self._read()
        return {
            fault.name: Outcome(fault, entry["caught_by"], entry["seconds"])
            for fault in faults
            if (entry := known.get(fault.name)) is not None and entry["key"] == fault.key()
        }

    def add(self, outcome: Outcome, key: str) -> None:
        """Keep an outcome, whatever else happens; `key` is that of the fault when the tree was copied."""
        entry = {"key": key, "caught_by": outcome.caught_by, "seconds": round(outcome.seconds, 1)}
        with self._lock:
            known = self._read() | {outcome.fault.name: entry}
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)


def check(faults: Sequence[Fault], jobs: int, on_outcome: Callable[[Outcome, str], None]) -> None:
    """Try each fault, several at a time, each in its own tree.

    A test that notices a fault must pass without it, or the fault was not what it noticed: raise `CheckError`.
    """
    for fault in faults:
        path = ROOT / fault.file
        if not path.is_file():
            raise CheckError(f"{fault.file}: no such file; it is named by the fault {fault.name!r}")
        fault.seeded(path.read_text(encoding="utf-8"))
    os.environ["OMP_NUM_THREADS"] = "1"
    keys = {fault.name: fault.key() for fault in faults}
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutation_check_") as temporary, ThreadPoolExecutor(jobs) as threads:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(jobs):
            trees.put(Tree(Path(temporary) / f"tree{number}"))

        def meets(fault: Fault) -> None:
            tree = trees.get()
            try:
                outcome = tree.meet(fault)
                if outcome.caught_by is not None and outcome.caught_by not in sound:
                    _check_sound(tree, outcome.caught_by)
                    sound.add(outcome.caught_by)
            except LookupError as error:
                raise CheckError(str(error)) from None
            finally:
                trees.put(tree)
            print(f"{outcome.seconds:6.1f} s  {fault.name}: {outcome.caught_by or 'SURVIVED'}", file=sys.stderr)
            on_outcome(outcome, keys[fault.name])

        try:
            list(threads.map(meets, faults))
        except CheckError:
            threads.shutdown(cancel_futures=True)
            raise


def _check_sound(tree: Tree, test: str) -> None:
    """Raise `CheckError` unless a test passes in a tree without faults."""
    try:
        failed = tree.run([test])
    except LookupError:
        # Names of cases may hold what pytest cannot be given back, so run all cases.
        failed = tree.run([test.partition("[")[0]])
    if failed is not None:
        raise CheckError(f"{failed} fails without any fault; fix that first")


def _code(lines: Sequence[str]) -> str:
    return "<br>".join(f"`{line}`".replace("|", r"\|") for line in lines) or "nothing"


def document(faults: Sequence[Fault], outcomes: Mapping[str, Outcome], command: str) -> str:
    """Return the outcomes as a Markdown page, which names the faults that have none."""
    caught = sum(outcome.caught_by is not None for outcome in outcomes.values())
    waiting = len(faults) - len(outcomes)
    text = f"""# Seeded faults

Written by `{command}`, which puts each fault below into a copy of the tree,
one at a time, and runs the tests that ought to notice it. The faults are in `scripts/dev/faults.toml`.

{caught} of {len(outcomes)} faults are caught.{f" Not tried: {waiting}." if waiting else ""}
"""
    for file in dict.fromkeys(fault.file for fault in faults):
        text += f"\n## {file}\n\n| fault | change | caught by | seconds |\n|---|---|---|---:|\n"
        for fault in [fault for fault in faults if fault.file == file]:
            text += f"| {fault.name} | {fault.change()} | {_outcome_cells(outcomes.get(fault.name))} |\n"
    return text


def _outcome_cells(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not tried |"
    caught_by = "**nothing**" if outcome.caught_by is None else _code([outcome.caught_by])
    return f"{caught_by} | {outcome.seconds:.0f}"


def main() -> int:
    """Try the faults that were asked for and have no result; 1 when one survives, 2 when the check cannot be made."""
    parser = argparse.ArgumentParser(description="Seed faults one at a time and see whether the tests notice.")
    parser.add_argument("--only", metavar="NAME", help="faults whose name or file contains this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table of all faults there")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where results are kept")
    parser.add_argument("--again", action="store_true", help="also try the faults whose results still hold")
    parser.add_argument("--no-run", action="store_true", help="try none, only show the results that hold")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time (%(default)s)")
    options = parser.parse_args()
    results = Results(options.results)
    try:
        faults = load_faults()
        asked = [fault for fault in faults if (options.only or "") in f"{fault.file} {fault.name}"]
        if not asked:
            raise CheckError(f"--only: no fault is called {options.only!r}")
        known = {} if options.again else results.of(asked)
        missing = [fault for fault in asked if fault.name not in known]
        print(f"{len(asked) - len(missing)} results hold, {len(missing)} faults to try", file=sys.stderr)
        if not options.no_run:
            check(missing, max(1, options.jobs), results.add)
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    if options.out:
        page = document(faults, results.of(faults), "scripts/dev/mutation_check.py --out docs/mutations.md")
        options.out.write_text(page, encoding="utf-8")
    outcomes = results.of(asked).values()
    survivors = [outcome.fault.name for outcome in outcomes if outcome.caught_by is None]
    print(f"{len(outcomes) - len(survivors)} of {len(asked)} faults caught", file=sys.stderr)
    for name in survivors:
        print(f"survived: {name}", file=sys.stderr)
    return SURVIVED if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
