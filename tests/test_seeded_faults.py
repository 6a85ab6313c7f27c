"""The seeded faults fit the code as it is, and the check that seeds them tells caught from survived."""

from __future__ import annotations

import multiprocessing
import subprocess

import pytest

from scripts.dev import mutation_check
from scripts.dev.mutation_check import (
    ROOT,
    CheckError,
    Fault,
    Outcome,
    Results,
    check,
    document,
    load_faults,
    named_files,
)

FAULTS = load_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_fits_exactly_one_place_and_names_tests_that_exist(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert fault.seeded(text) != text
    for test in fault.tests:
        assert named_files(ROOT, test), test


def test_stale_faults_and_faults_that_are_not_python_are_errors():
    fault = Fault("f", "a.py", "x = 1", "x = 2", ())
    assert fault.seeded("x = 1\n") == "x = 2\n"
    for text in ("x = 3\n", "x = 1\nx = 1\n"):
        with pytest.raises(CheckError, match=r"a\.py: the text of the fault 'f' occurs [02] times"):
            fault.seeded(text)
    with pytest.raises(CheckError, match="not Python"):
        Fault("f", "a.py", "x = 1", "x = (", ()).seeded("x = 1\n")


@pytest.fixture
def small_tree(tmp_path, monkeypatch):
    """A tree of one module and one test, half of whose faults the test notices."""
    root = tmp_path / "tree"
    root.mkdir()
    (root / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n")
    (root / "test_sums.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    (root / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (root / ".venv").mkdir()
    for command in (["init", "-q"], ["add", "sums.py", "test_sums.py", "pytest.ini"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.setattr(mutation_check, "ROOT", root)
    # This tree needs none of the slow imports.
    monkeypatch.setattr(mutation_check, "FORKS", multiprocessing.get_context("spawn"))
    return root


CAUGHT = Fault("minus", "sums.py", "a + b", "a - b", ("test_sums.py",))
SURVIVES = Fault("thrice", "sums.py", "2 * a", "3 * a", ("test_sums.py",))


def outcomes_of(*faults: Fault, jobs: int = 1) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    check(faults, jobs, lambda outcome, key: outcomes.update({outcome.fault.name: outcome}))
    return outcomes


def test_faults_are_seeded_into_a_copy_and_caught_or_survive(small_tree):
    before = (small_tree / "sums.py").read_text()
    again = Fault("minus again", *(getattr(CAUGHT, name) for name in ("file", "right", "wrong", "tests")))
    outcomes = outcomes_of(CAUGHT, SURVIVES, again)
    assert [outcome.caught_by for outcome in outcomes.values()] == [
        "test_sums.py::test_add",
        None,
        "test_sums.py::test_add",
    ]
    assert (small_tree / "sums.py").read_text() == before
    later = Fault("later", "sums.py", "2 * a", "4 * a", ("test_sums.py",))
    page = document([CAUGHT, SURVIVES, again, later], outcomes, "the command")
    assert "2 of 3 faults are caught. Not tried: 1." in page
    assert "| thrice | `2 * a` → `3 * a` | **nothing** |" in page
    assert "| later | `2 * a` → `4 * a` | not tried | |" in page


def test_results_are_kept_until_the_fault_or_the_code_of_its_file_or_tests_changes(small_tree, tmp_path):
    results = Results(tmp_path / "results.json")
    faults = [CAUGHT, SURVIVES]
    assert results.of(faults) == {}
    results.add(Outcome(CAUGHT, "test_sums.py::test_add", 1.0), CAUGHT.key())
    results.add(Outcome(SURVIVES, None, 2.0), SURVIVES.key())
    assert results.of(faults) == {
        "minus": Outcome(CAUGHT, "test_sums.py::test_add", 1.0),
        "thrice": Outcome(SURVIVES, None, 2.0),
    }
    changed = Fault("minus", "sums.py", "a + b", "a * b", ("test_sums.py",))
    assert list(results.of([changed, SURVIVES])) == ["thrice"]
    for name in ("sums.py", "test_sums.py"):
        text = (small_tree / name).read_text()
        (small_tree / name).write_text(f'"""Another docstring."""\n\n{text}# another comment\n')
        assert len(results.of(faults)) == 2
        (small_tree / name).write_text(text + "x = 1\n")
        assert results.of(faults) == {}
        (small_tree / name).write_text(text)
    assert len(results.of(faults)) == 2


def test_tests_that_fail_without_a_fault_or_do_not_run_are_errors(small_tree):
    with pytest.raises(CheckError, match="there are no such tests"):
        outcomes_of(Fault("minus", "sums.py", "a + b", "a - b", ("test_gone.py",)))
    crash = Fault("crash", "sums.py", "return a + b", "import os; os.abort()", ("test_sums.py",))
    with pytest.raises(CheckError, match=r"did not run to their end \(code -6\)"):
        outcomes_of(crash, jobs=2)
    (small_tree / "test_sums.py").write_text("def test_add():\n    assert False\n")
    with pytest.raises(CheckError, match=r"test_sums\.py::test_add fails without any fault"):
        outcomes_of(CAUGHT)
