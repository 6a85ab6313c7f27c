"""Documents, READMEs and --help: what they show exists and is read by its script, and generated figures are current."""

from __future__ import annotations

import contextlib
import io
import re
import resource
import runpy
import shlex
import subprocess
import sys
from unittest import mock

import pytest
import yaml

from memory.predict import Predictor
from runtime.cli import INTERRUPTED, OUT_OF_MEMORY
from scripts.dev.documents import of_settings
from scripts.dev.predicted_tables import OUTPUT, TABLE, gib, guide_configs, knobs, need, output_of
from settings import UserError, load_settings
from settings.load import known_keys
from tests.nested_values import leaves
from tests.test_architecture import ARROWS, ROOT, SOURCES

SCRIPTS = [path for path in (*ROOT.glob("train_*.py"), *ROOT.glob("scripts/*.py")) if "__main__" in path.read_text()]
COMMANDS = sorted(str(path.relative_to(ROOT)) for path in SCRIPTS)
HELP_SECONDS = 0.5
READMES = ("README.md", "README.zh-CN.md")
USING = ("docs/using.md", "docs/using.zh-CN.md")
DOCUMENTS = (*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md"))
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in DOCUMENTS}
WHOLE = {name: TEXTS[name] + TEXTS[using] for name, using in zip(READMES, USING, strict=True)}
"""Each README with the page that says what it leaves out."""


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[tuple[str, ...]]:
    """Return the commands for scripts of this project, from code blocks, inline code and comments."""
    joined = re.sub(r"\\\n\s*", " ", text)
    pattern = r"(?:^|[`'#:]|exec)\s*((?:python|torchrun|bash) [^`'\n]*?)(?= -->|[`'\n])"
    lines = (tuple(shlex.split(line, comments=True)) for line in re.findall(pattern, joined, re.MULTILINE))
    return [words for words in lines if any(word.endswith((".py", ".sh")) for word in words)]


def script_of(words: tuple[str, ...]) -> str:
    """Return the script that a command runs."""
    return next(word for word in words if word.endswith((".py", ".sh")))


def read_by_its_script(words: tuple[str, ...]) -> None:
    """Let the script's own parser read a command, and load the config with the overrides that it names."""
    script = script_of(words)
    assert (ROOT / script).is_file(), f"there is no {script}"
    if script.endswith(".sh"):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
        return
    arguments = [script, *words[words.index(script) + 1 :]]
    with mock.patch("runtime.cli.run", return_value=0) as run, mock.patch.object(sys, "argv", arguments):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit:
            assert run.call_count == 1, f"{script} rejects {words}"
    options = run.call_args.args[1]
    if getattr(options, "config", None):
        load_settings(ROOT / options.config, getattr(options, "overrides", []))


def help_of(script: str) -> str:
    """Return what --help prints."""
    arguments = mock.patch.object(sys, "argv", [script, "--help"])
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit), arguments:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return printed.getvalue()


HELP = {command: help_of(command) for command in COMMANDS}


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


def test_every_command_in_documents_presets_and_help_is_read_by_its_script():
    """Options exist and have allowed values, configs load, overrides are valid: everything short of running it."""
    presets = [path.read_text(encoding="utf-8") for path in ROOT.glob("configs/*.yaml")]
    examples = [text.partition("examples:")[2] for text in HELP.values()]
    found = {words for text in (*TEXTS.values(), *presets, *examples) for words in commands(text)}
    assert len(found) > 40
    for words in sorted(found):
        read_by_its_script(words)


@pytest.mark.parametrize("name", READMES)
def test_readme_is_short_and_its_files_options_keys_and_outputs_exist(name):
    text, whole = TEXTS[name], WHOLE[name]
    assert len(text.splitlines()) <= 180
    assert commands(text)[:2] == [("bash", "scripts/quickstart.sh"), ("bash", "scripts/test.sh")]
    lines = sum(len(block.splitlines()) for block in fenced(text, "bash"))
    assert len(commands(text)) >= lines, "every line of a bash block is a command that is checked"
    for option in set(re.findall(r"`(--[a-z-]+)(?: [^`]*)?`", whole)):
        assert re.search(rf"(^|[\s\[]){option}\b", "".join(HELP.values())), f"no command has {option}"
    quoted = re.findall(r"`([\w./-]+\.(?:py|sh|yaml|json|md|txt))`", text)
    missing = [path for path in quoted if not any((ROOT / folder / path).exists() for folder in ("", "scripts"))]
    assert {*missing} <= {"dataset.json", "report.html", "fits.yaml", "check_gpu.md"}
    keys = {dotted for dotted, _ in known_keys()}
    named = re.findall(r"`((?:data|autoencoder|ldm|device)\.[a-z_.]+)`", whole)
    assert named
    assert [key for key in named if key not in keys] == []
    overrides = set(re.findall(r"(?:[a-z_]+\.)+[a-z_]+=[^\s`]+(?: (?:[a-z_]+\.)+[a-z_]+=[^\s`]+)*", whole))
    assert len(overrides) > 4
    for line in overrides - {"section.key=value"}:
        load_settings(ROOT / "configs" / "default.yaml", line.split())
    blocks = [tuple(shlex.split(block["command"])) for block in OUTPUT.finditer(text)]
    assert len(blocks) == text.count("```text")
    assert all(words in commands(whole) and script_of(words) == "scripts/oom_ladder.py" for words in blocks)


@pytest.mark.slow
@pytest.mark.parametrize("name", READMES)
def test_shown_output_is_what_the_command_prints(name):
    for block in OUTPUT.finditer(TEXTS[name]):
        assert output_of(block["command"]) == block["output"], "run python -m scripts.dev.documents"


GUIDES = ("docs/memory_guide.md", "docs/memory_guide.zh-CN.md")


@pytest.mark.parametrize("names", [READMES, USING, GUIDES])
def test_translation_has_the_same_commands_links_headings_and_tables(names):
    english, chinese = (TEXTS[name] for name in names)
    assert commands(english) == commands(chinese)
    for pattern in (r"^#+ ", r"^\|"):
        assert len(re.findall(pattern, english, re.MULTILINE)) == len(re.findall(pattern, chinese, re.MULTILINE))
    links = [re.findall(r"\]\(([^)]+)\)", text.replace(".zh-CN", "")) for text in (english, chinese)]
    assert set(links[0]) == set(links[1])


@pytest.mark.parametrize("name", READMES)
def test_exit_codes_are_those_of_the_program(name):
    line = next(line for line in TEXTS[name].splitlines() if line.startswith(("Exit codes", "退出码")))
    assert [int(n) for n in re.findall(r"\d+", line)] == [0, UserError.exit_code, OUT_OF_MEMORY, INTERRUPTED]


def test_every_block_of_config_in_documents_is_valid_in_a_preset():
    blocks = [block for name, text in TEXTS.items() if name not in READMES for block in fenced(text, "yaml")]
    assert len(blocks) >= 6
    for block in blocks:
        preset = "maisi" if "maisi" in block else "default"
        changes = dict(leaves(yaml.safe_load(block)))
        found = load_settings(ROOT / "configs" / f"{preset}.yaml", stage="ldm").with_overrides(changes)
        assert found.ldm.conditioning.is_used, block


def test_the_overrides_for_maisis_older_unet_suit_its_preset():
    (overrides,) = re.findall(r"The older U-Net[^`]*`([^`]+)`", TEXTS["docs/conditioning.md"])
    ldm = load_settings(ROOT / "configs" / "maisi.yaml", overrides.split(), stage="ldm").ldm
    assert (ldm.scheduler.prediction, ldm.scheduler.schedule) == ("epsilon", "scaled_linear_beta")
    assert ldm.conditioning.scan.inputs == ("top_region", "bottom_region", "spacing")


def test_schema_and_reference_are_current():
    for path, text in of_settings().items():
        assert text == path.read_text(encoding="utf-8"), "run python -m scripts.dev.documents --settings"


GUIDE = list(TABLE.finditer(TEXTS["docs/memory_guide.md"]))


def test_every_row_of_the_guide_is_a_config_of_its_own_and_the_same_mathematics_needs_less_row_by_row():
    rows = {table.start(): guide_configs(table) for table in GUIDE}
    assert sum(map(len, rows.values())) > 60
    for table in GUIDE:
        assert len(rows[table.start()]) == table["rows"].count("\n")
        texts = [settings.model_dump_json() for settings in rows[table.start()].values()]
        assert len(set(texts)) == len(texts), table["head"]
    [ladder] = [table for table in GUIDE if table["name"] == "ladder"]
    peaks = [float(line.split("|")[2]) for line in ladder["rows"].splitlines()]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] / peaks[9] > 5, "the rungs before other mathematics are worth more than a factor of five"


@pytest.mark.usefixtures("shared_workers")
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


def test_links_of_documents_exist():
    for name, text in TEXTS.items():
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert ((ROOT / name).parent / link).exists(), f"{name} points at {link}"


def test_architecture_names_files_that_exist_every_folder_with_code_and_the_arrows_that_are_enforced():
    text = TEXTS["docs/architecture.md"]
    named = re.findall(r"`([\w/]+(?:\.(?:py|yaml)|/))`", text)
    assert len(named) > 60
    assert [path for path in named if not (ROOT / path).exists()] == []
    code = [path for path in SOURCES if path.parent != ROOT and path.relative_to(ROOT).parts[0] != "tests"]
    assert {f"{path.parent.relative_to(ROOT)}/" for path in code} <= set(named)
    (drawn,) = fenced(text, "text")
    rooms = [tuple(re.findall(r"[a-z_.]+", line)) for line in drawn.split("<-")]
    assert rooms == ARROWS
