"""Seed faults one at a time into a copy of the tree and see whether the tests notice.

python dev/mutation_check.py --out docs/mutations.md
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_name("faults.toml")
SURVIVED, UNUSABLE = 1, 2
TEST_SECONDS = 120  # a fault may make a test wait for ever
PASSED, FAILED = 0, 1  # pytest's own codes; the others mean that the tests did not run


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


def named_files(folder: Path, test: str) -> list[str]:
    """Return the test files that a path, perhaps with a `*`, names; each with the test in it that may follow `::`."""
    path, *inside = test.split("::")
    return ["::".join([str(file.relative_to(folder)), *inside]) for file in sorted(folder.glob(path))]


def _run_tests(folder: Path, tests: Sequence[str], said: Path) -> None:
    """Run tests in a copy of the tree, in a fork that has imported nothing of the project."""
    import pytest

    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.dont_write_bytecode = False  # whatever the environment says: most files are the same in the next run
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={folder}-tests"]
    code = pytest.main([*options, f"--timeout={TEST_SECONDS}", *tests])
    sys.stdout.flush()
    os._exit(code)


def load_faults(path: Path = FAULTS) -> list[Fault]:
    """Return all faults; their names are unique."""
    files = tomllib.loads(path.read_text(encoding="utf-8"))["files"]
    faults = [
        Fault(f["name"], file["path"], f["right"], f["wrong"], tuple(f.get("tests", file["tests"])))
        for file in files
        for f in file["faults"]
    ]
    names = [fault.name for fault in faults]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise CheckError(f"{path}: several faults are called {', '.join(sorted(doubled))}")
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
        """Run tests up to the first that fails and return its name; None when all pass."""
        said = self.folder.with_suffix(".txt")
        paths = [path for test in tests for path in named_files(self.folder, test) or [test]]
        process = FORKS.Process(target=_run_tests, args=(self.folder, paths, said))
        process.start()
        process.join()
        if process.exitcode == PASSED:
            return None
        text = said.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
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
        # Python tells stale bytecode by the length of a file and its time in whole seconds: each version has its own.
        self.time += 1
        os.utime(path, (self.time, self.time))


def check(faults: Sequence[Fault], jobs: int) -> list[Outcome]:
    """Verify that the tests pass without faults, then try each fault; several at a time, each in its own tree."""
    for fault in faults:
        path = ROOT / fault.file
        if not path.is_file():
            raise CheckError(f"{fault.file}: no such file; it is named by the fault {fault.name!r}")
        fault.seeded(path.read_text(encoding="utf-8"))
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="mutation_check_") as temporary, ThreadPoolExecutor(jobs) as threads:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(jobs):
            trees.put(Tree(Path(temporary) / f"tree{number}"))

        @contextmanager
        def a_tree() -> Iterator[Tree]:
            tree = trees.get()
            try:
                yield tree
            finally:
                trees.put(tree)

        def passes(test: str) -> None:
            with a_tree() as tree:
                failed = tree.run([test])
            if failed is not None:
                raise CheckError(f"{failed} fails without any fault; fix that first")

        def meets(fault: Fault) -> Outcome:
            with a_tree() as tree:
                outcome = tree.meet(fault)
            print(f"{outcome.seconds:6.1f} s  {fault.name}: {outcome.caught_by or 'SURVIVED'}", file=sys.stderr)
            return outcome

        try:
            list(threads.map(passes, dict.fromkeys(test for fault in faults for test in fault.tests)))
            print("the tests pass without a fault", file=sys.stderr)
            return list(threads.map(meets, faults))
        except CheckError:
            threads.shutdown(cancel_futures=True)
            raise


def _code(lines: Sequence[str]) -> str:
    return "<br>".join(f"`{line}`".replace("|", r"\|") for line in lines) or "nothing"


def document(outcomes: Sequence[Outcome], command: str) -> str:
    """Return the outcomes as a Markdown page."""
    caught = sum(outcome.caught_by is not None for outcome in outcomes)
    text = f"""# Seeded faults

Written by `{command}`, which puts each fault below into a copy of the tree,
one at a time, and runs the tests that ought to notice it. The faults are in `dev/faults.toml`.

{caught} of {len(outcomes)} faults are caught.
"""
    for file in dict.fromkeys(outcome.fault.file for outcome in outcomes):
        text += f"\n## {file}\n\n| fault | change | caught by | seconds |\n|---|---|---|---:|\n"
        for outcome in [outcome for outcome in outcomes if outcome.fault.file == file]:
            caught_by = "**nothing**" if outcome.caught_by is None else _code([outcome.caught_by])
            text += f"| {outcome.fault.name} | {outcome.fault.change()} | {caught_by} | {outcome.seconds:.0f} |\n"
    return text


def main() -> int:
    """Check the faults that were asked for; 1 when one survives, 2 when the check cannot be made."""
    parser = argparse.ArgumentParser(description="Seed faults one at a time and see whether the tests notice.")
    parser.add_argument("--only", metavar="NAME", help="faults whose name or file contains this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there instead of printing it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time (%(default)s)")
    options = parser.parse_args()
    if options.only and options.out:
        parser.error("--out: the table holds all faults; leave --only out")
    try:
        asked = [fault for fault in load_faults() if (options.only or "") in f"{fault.file} {fault.name}"]
        if not asked:
            raise CheckError(f"--only: no fault is called {options.only!r}")
        outcomes = check(asked, max(1, options.jobs))
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNUSABLE
    page = document(outcomes, "python dev/mutation_check.py --out docs/mutations.md")
    if options.out:
        options.out.write_text(page, encoding="utf-8")
    else:
        print(page)
    survivors = [outcome.fault.name for outcome in outcomes if outcome.caught_by is None]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} faults caught", file=sys.stderr)
    for name in survivors:
        print(f"survived: {name}", file=sys.stderr)
    return SURVIVED if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
