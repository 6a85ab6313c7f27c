"""The first cases of tests/support/fuzz_campaign.py, and that it notices what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fuzz_campaign
from tests.support.fuzz_campaign import Campaign, Tally, document, prepare
from tests.support.fuzz_cases import KINDS, Case, make_case

NUM_CASES = 3 * len(KINDS)


@pytest.fixture(scope="module")
def base(warm, tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("fuzz") / "base", warm)


def test_every_kind_of_damaged_input_gets_a_readable_error(warm, base, tmp_path, monkeypatch):
    # Generous, because the machine may be busy; a case that hangs never ends anyway.
    monkeypatch.setattr(fuzz_campaign, "PROCESSOR_SECONDS", 4 * fuzz_campaign.PROCESSOR_SECONDS)
    tally = Campaign(tmp_path, base, seed=1, start=warm).run(range(NUM_CASES), jobs=2)
    assert tally.failures == []
    assert tally.num_cases == NUM_CASES
    assert {kind for kind, _ in tally.codes} == set(KINDS)
    assert "failures: 0" in document(tally, "command")


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


def test_case_is_a_function_of_seed_and_number(base, tmp_path):
    for number in range(len(KINDS)):
        cases = [
            make_case(number, seed, base, tmp_path / f"{number}_{seed}_{again}") for seed, again in ((0, 0), (0, 1))
        ]
        assert cases[0] == cases[1]
        assert contents(tmp_path / f"{number}_0_0") == contents(tmp_path / f"{number}_0_1")
    assert make_case(0, 1, base, tmp_path / "other") != cases[0]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys; sys.exit(2)", "exit code 2 without a reason"),
        ("import sys; sys.exit('error: 1')", "exit code 1"),
        ("import os; os.abort()", "exit code -6"),
        ("raise KeyError('x')", "a traceback (KeyError: 'x')"),
        ("while True: pass", "no end within"),
        ("import time; time.sleep(100)", "no end within"),
        ("open('executed', 'w')", "code from the input was executed"),
    ],
)
def test_campaign_notices(warm, tmp_path, monkeypatch, program, expected):
    (tmp_path / "program.py").write_text(program)
    empty = tmp_path / "empty"
    empty.mkdir()

    def one_case(number: int, seed: int, base: Path, folder: Path) -> Case:
        folder.mkdir()
        return Case("test", "a program", (str(tmp_path / "program.py"),))

    monkeypatch.setattr("tests.support.fuzz_cases.make_case", one_case)
    if expected == "no end within":
        monkeypatch.setattr(fuzz_campaign, "PROCESSOR_SECONDS", 1.0)
        monkeypatch.setattr(fuzz_campaign, "CLOCK_SECONDS", 3.0)
    tally = Campaign(tmp_path, empty, seed=0, start=warm).run([0], jobs=1)
    (failure,) = tally.failures
    assert expected in failure
    assert (tmp_path / "case_0000").exists(), "what failed can be looked at"
    assert failure in document(tally, "command")


def test_good_case_leaves_nothing_behind(warm, base, tmp_path, monkeypatch):
    def one_case(number: int, seed: int, base: Path, folder: Path) -> Case:
        folder.mkdir()
        return Case("test", "nothing", ("scripts/report.py", "--help"))

    monkeypatch.setattr("tests.support.fuzz_cases.make_case", one_case)
    tally = Campaign(tmp_path, base, seed=0, start=warm).run([0], jobs=1)
    assert (tally.failures, list(tmp_path.iterdir())) == ([], [])
    assert isinstance(tally, Tally)
