"""Generated documents: present, with every technique, and every command answers --help at once without torch."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [
    str(path.relative_to(ROOT))
    for path in sorted([*ROOT.glob("train_*.py"), *ROOT.glob("scripts/*.py")])
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]
HELP_SECONDS = 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_quick_has_examples_and_needs_no_torch(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = [sys.executable, "-X", "importtime", str(ROOT / command), "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "monai", "numpy", "scipy", "matplotlib"}
    assert "--quiet" in done.stdout
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Processor time, and twice the bar: a machine that runs other tests at the same time is no reason to fail.
    assert used < 2 * HELP_SECONDS


def test_memory_guide_covers_every_technique():
    from dev.guide.catalogue import CATALOGUE
    from dev.guide.techniques import RULES_ORDER, SAME_FIRST

    text = (ROOT / "docs" / "memory_guide.md").read_text(encoding="utf-8")
    for technique in CATALOGUE:
        assert f"### {technique.title}\n" in text
        assert f"Rule of thumb: {technique.rule}." in text
    for point in (*SAME_FIRST, *RULES_ORDER):
        assert f"| {point.name} | " in text
    assert len(re.findall(r"\| \d+\.\d\d \|", text)) > 50


def test_memory_guide_shows_that_the_same_mathematics_needs_less_row_by_row():
    text = (ROOT / "docs" / "memory_guide.md").read_text(encoding="utf-8")
    table = text.split("## The ladder")[1].split("##")[0]
    peaks = [float(row) for row in re.findall(r"^\| [^|]+ \| (\d+\.\d\d) \|", table, re.MULTILINE)]
    assert len(peaks) == 14
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] / peaks[9] > 5, "the rungs before other mathematics are worth more than a factor of five"


def test_documents_are_linked_and_without_dangling_links():
    for document in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name} points at {link}"
