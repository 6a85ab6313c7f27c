"""The seeded faults fit the code as it is, and the check that seeds them tells caught from survived."""

from __future__ import annotations

import subprocess

import pytest

from scripts.dev import mutation_check
from scripts.dev.mutation_check import ROOT, CheckError, Fault, caught_by, load_faults


def test_every_fault_fits_exactly_one_place_and_names_tests_that_exist():
    faults = load_faults()
    assert len(faults) > 100
    problems = []
    for fault in faults:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        try:
            assert fault.seeded(text) != text, fault.name
            fault.test_files(ROOT)
        except CheckError as error:
            problems.append(str(error))
    assert problems == []


def test_faults_are_seeded_into_a_copy_and_caught_or_survive(tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n")
    (tmp_path / "test_sums.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    before = (tmp_path / "sums.py").read_text()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutation_check, "ROOT", tmp_path)

    assert caught_by(Fault("minus", "sums.py", "a + b", "a - b", ("test_s*.py",))) == "test_sums.py::test_add"
    assert caught_by(Fault("thrice", "sums.py", "2 * a", "3 * a", ("test_sums.py",))) is None
    assert (tmp_path / "sums.py").read_text() == before
    with pytest.raises(CheckError, match=r"test_wrong\.py::test_wrong fails without any fault"):
        caught_by(Fault("minus", "sums.py", "a + b", "a - b", ("test_wrong.py",)))
    with pytest.raises(CheckError, match="there are no such tests"):
        caught_by(Fault("minus", "sums.py", "a + b", "a - b", ("test_gone.py",)))
    with pytest.raises(CheckError, match=r"did not run to their end \(code -6\)"):
        caught_by(Fault("abort", "sums.py", "return a + b", "import os; os.abort()", ("test_sums.py",)))
