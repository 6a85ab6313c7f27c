"""Generated documents match their stored figures, and every command's --help is quick and needs no torch."""

from __future__ import annotations

import itertools
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from memory.predict import Predictor
from memory.predict.prediction import Stage
from scripts.dev import memory_guide
from scripts.dev.guide.stored import StoredPredictor, kept, question, read
from scripts.dev.guide.techniques import AMP, CHECKPOINTED, LEAN, SAME_FIRST, base_settings
from settings import Settings, load_settings
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


def test_memory_guide_shows_the_stored_predictions():
    """Verbatim: every technique, figure and sentence, from the predictions in docs/predictions.json."""
    text = memory_guide.document(memory_guide.Asker(StoredPredictor("guide"), bar=None))
    assert text == (ROOT / "docs" / "memory_guide.md").read_text(encoding="utf-8"), (
        "run python scripts/dev/memory_guide.py, with --stored if only words have changed"
    )


def test_predictions_of_the_documents_are_current():
    """Predict one entry of each section again; the tests of preset_table predict stage 1 of every preset."""
    quickstart = load_settings(ROOT / "configs" / "quickstart.yaml")
    small = base_settings().with_overrides({**AMP, **LEAN, **CHECKPOINTED, "data.patch_size": (64, 64, 64)})
    quality = load_settings(ROOT / "configs" / "quality.yaml")
    accumulated = load_settings(ROOT / "configs" / "default.yaml").with_overrides(
        {"autoencoder.training.batch_size": 1, "autoencoder.training.gradient_accumulation_steps": 4}
    )
    chosen: tuple[tuple[str, Settings, Stage], ...] = (
        ("presets", quickstart, "ldm"),
        ("knobs", accumulated, "autoencoder"),
        ("guide", small, "autoencoder"),
        ("readme", quality, "autoencoder"),
    )
    with Predictor(2) as predictor:
        asked = [predictor.submit(settings, stage) for _, settings, stage in chosen]
        for (section, settings, stage), answer in zip(chosen, asked, strict=True):
            found = kept(answer.result().to_json(), section)
            wanted = read(section)[question(settings, stage)]
            assert {name: found[name] for name in wanted} == wanted, f"{section}: write the documents again"


def test_documents_with_the_same_step_have_the_same_figure():
    sections = [read(name) for name in ("presets", "knobs", "guide", "readme")]
    shared = 0
    for one, other in itertools.combinations(sections, 2):
        for name in one.keys() & other.keys():
            shared += 1
            assert one[name]["peak_allocated_bytes"] == other[name]["peak_allocated_bytes"], name
            assert one[name]["flops"] == other[name]["flops"], name
    assert shared >= 6


def test_memory_guide_shows_that_the_same_mathematics_needs_less_row_by_row():
    text = (ROOT / "docs" / "memory_guide.md").read_text(encoding="utf-8")
    table = text.split("## The ladder")[1].split("##")[0]
    peaks = [float(row) for row in re.findall(r"^\| [^|]+ \| (\d+\.\d\d) \|", table, re.MULTILINE)]
    assert len(peaks) == len(SAME_FIRST)
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
