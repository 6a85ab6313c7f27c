"""Generated documents are current, and every command's --help is quick and needs no torch."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from memory.predict import Predictor
from scripts.dev.documents import of_settings
from scripts.dev.predicted_tables import TABLE, gib, guide_configs, knobs, need
from settings import load_settings
from tests.command_lines import commands, help_of, read_by_its_script
from tests.nested_values import leaves
from tests.test_architecture import ARROWS, SOURCES

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
    assert "examples:" in done.stdout
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Processor time, and three times the limit, because the machine may be running other tests.
    assert used < 3 * HELP_SECONDS


EXAMPLES = {
    words
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.yaml")]
    for words in commands(path.read_text(encoding="utf-8"))
} | {words for command in COMMANDS for words in commands(help_of(command).partition("examples:")[2])}


def test_every_command_in_documents_presets_and_help_is_read_by_its_script():
    """Options exist and have allowed values, configs load, overrides are valid: everything short of running it."""
    assert len(EXAMPLES) > 30
    for words in sorted(EXAMPLES):
        read_by_its_script(words)


def test_every_block_of_config_in_documents_is_valid_in_a_preset():
    blocks = [
        block
        for path in sorted((ROOT / "docs").glob("*.md"))
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    ]
    assert len(blocks) >= 6
    for block in blocks:
        preset = "maisi" if "maisi" in block else "default"
        changes = dict(leaves(yaml.safe_load(block)))
        found = load_settings(ROOT / "configs" / f"{preset}.yaml", stage="ldm").with_overrides(changes)
        assert found.ldm.conditioning.is_used, block


def test_schema_and_reference_are_current():
    for path, text in of_settings().items():
        assert text == path.read_text(encoding="utf-8"), "run python -m scripts.dev.documents --settings"


GUIDE = list(TABLE.finditer((ROOT / "docs" / "memory_guide.md").read_text(encoding="utf-8")))


def test_every_row_of_the_guide_is_a_config_of_its_own():
    rows = {table.start(): guide_configs(table) for table in GUIDE}
    assert sum(map(len, rows.values())) > 60
    for table in GUIDE:
        assert len(rows[table.start()]) == table["rows"].count("\n")
        texts = [settings.model_dump_json() for settings in rows[table.start()].values()]
        assert len(set(texts)) == len(texts), table["head"]


def test_figures_of_the_guide_and_of_headers_are_current():
    """Predict a row of the guide and a knob of a preset again; stage 1 of every preset in README has a test."""
    change = "batch_size=1, accumulated 4"
    default = load_settings(ROOT / "configs" / "default.yaml")
    changed = default.with_overrides(knobs(default)["autoencoder"][change])
    rows = {cell: settings for table in GUIDE for cell, settings in guide_configs(table).items()}
    [(row, patches)] = [(cell, settings) for cell, settings in rows.items() if cell.startswith("patches of 64x64x64")]
    with Predictor(2) as predictor:
        of_row, of_knob = (predictor.submit(settings, "autoencoder") for settings in (patches, changed))
        peak = gib(of_row.result().peak_allocated_bytes, 2)
        header = f"{change}: {need(of_knob.result())}"
    assert any(f"| {row} | {peak} |" in table["rows"] for table in GUIDE), "write the documents again"
    assert header in (ROOT / "configs" / "default.yaml").read_text(encoding="utf-8"), "write the documents again"


def test_memory_guide_shows_that_the_same_mathematics_needs_less_row_by_row():
    [ladder] = [table for table in GUIDE if table["name"] == "ladder"]
    peaks = [float(line.split("|")[2]) for line in ladder["rows"].splitlines()]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] / peaks[9] > 5, "the rungs before other mathematics are worth more than a factor of five"


def test_links_of_documents_exist():
    for document in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name} points at {link}"


def test_architecture_names_files_that_exist_every_folder_with_code_and_the_arrows_that_are_enforced():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+(?:\.(?:py|yaml)|/))`", text)
    assert len(named) > 60
    assert [path for path in named if not (ROOT / path).exists()] == []
    code = [path for path in SOURCES if path.parent != ROOT and path.relative_to(ROOT).parts[0] != "tests"]
    assert {f"{path.parent.relative_to(ROOT)}/" for path in code} <= set(named)
    drawn = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert drawn is not None
    rooms = [tuple(re.findall(r"[a-z_.]+", line)) for line in drawn[1].split("<-")]
    assert rooms == ARROWS
