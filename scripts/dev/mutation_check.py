"""Seed the faults of faults.toml one at a time into a copy of the tree and see whether the tests notice.

python -m scripts.dev.mutation_check --only "gradient"
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
TEST_SECONDS = 300  # a fault may make a test wait for ever


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

    def test_files(self, folder: Path) -> list[str]:
        """Return the tests with `*` replaced by what it stands for in a tree; a test named after `::` is kept."""
        found = []
        for test in self.tests:
            path, *inside = test.split("::")
            files = sorted(folder.glob(path))
            if not files:
                raise CheckError(f"the fault {self.name!r}: there are no such tests: {test}")
            found += ["::".join([str(file.relative_to(folder)), *inside]) for file in files]
        return found


def load_faults() -> list[Fault]:
    """Return all faults."""
    return [
        Fault(name, file, fault["right"], fault["wrong"], tuple(fault.get("tests", faults["tests"])))
        for file, faults in tomllib.loads(FAULTS.read_text(encoding="utf-8")).items()
        for name, fault in faults.items()
        if name != "tests"
    ]


def caught_by(fault: Fault) -> str | None:
    """Return the first test that fails with the fault and passes without it; None when all pass with the fault."""
    with tempfile.TemporaryDirectory(prefix="mutation_check_") as temporary:
        folder = Path(temporary) / "tree"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        path, tests = folder / fault.file, fault.test_files(folder)
        text = path.read_text(encoding="utf-8")
        path.write_text(fault.seeded(text), encoding="utf-8")
        failed = _first_failure(folder, tests)
        if failed is not None:
            path.write_text(text, encoding="utf-8")
            shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # it may look as new as the file
            if _first_failure(folder, [*tests, "--last-failed"]) is not None:
                raise CheckError(f"{failed} fails without any fault, too; mend that first")
        return failed


def _first_failure(folder: Path, arguments: list[str]) -> str | None:
    options = ["-q", "-x", "--tb=no", f"--timeout={TEST_SECONDS}", f"--basetemp={folder.with_name('tests')}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:  # pytest's codes above 1 mean that the tests did not run
        ending = f"did not run to their end (code {done.returncode})"
        raise CheckError(f"{' '.join(arguments)}: the tests {ending}:\n{(done.stdout + done.stderr)[-3000:]}")
    return failed[1]


def main() -> int:
    """Try the faults that were asked for; return 1 when one survives, 2 when one cannot be tried."""
    parser = argparse.ArgumentParser(description="Seed faults one at a time and see whether the tests notice.")
    parser.add_argument("--only", default="", metavar="NAME", help="faults whose name or file contains this")
    options = parser.parse_args()
    faults = [fault for fault in load_faults() if options.only in f"{fault.file} {fault.name}"]
    if not faults:
        parser.error(f"--only: no fault is called {options.only!r}")
    outcomes: Counter[str] = Counter()
    for fault in faults:
        try:
            found = caught_by(fault)
            outcome, why = ("survived", "") if found is None else ("caught", f": {found}")
        except CheckError as error:
            outcome, why = "not tried", f": {error}"
        outcomes[outcome] += 1
        print(f"{outcome:9} {fault.name}{why}", flush=True)
    print(f"{outcomes['caught']} of {len(faults)} faults caught, {outcomes['survived']} survived")
    return 2 if outcomes["not tried"] else 1 if outcomes["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
