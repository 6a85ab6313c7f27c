"""What README mentions exists: commands, options, files, config keys, exit codes; and its translation matches."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from scripts.dev.predicted_tables import OUTPUT, output_of
from settings import ConfigError, load_settings
from settings.load import known_keys
from tests.command_lines import commands, help_of, read_by_its_script, script_of

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-CN.md")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in READMES}
USING = ("docs/using.md", "docs/using.zh-CN.md")
WHOLE = {
    name: TEXTS[name] + (ROOT / using).read_text(encoding="utf-8") for name, using in zip(READMES, USING, strict=True)
}
"""Each README with the page that says what it leaves out."""


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


ALL = sorted({words for text in WHOLE.values() for words in commands(text)})


@pytest.mark.parametrize("name", READMES)
def test_readme_is_short(name):
    assert len(TEXTS[name].splitlines()) <= 180


def test_readme_has_the_two_commands_first():
    first, second, *_ = commands(TEXTS["README.md"])
    assert first == ("bash", "scripts/quickstart.sh")
    assert second == ("bash", "scripts/test.sh")
    assert len(ALL) >= 10
    lines = sum(len(block.splitlines()) for block in fenced(TEXTS["README.md"], "bash"))
    assert len(commands(TEXTS["README.md"])) >= lines, "every line of a bash block is a command that is checked"


def test_every_command_is_read_by_its_script():
    """Options exist and have allowed values, configs load, overrides are valid: everything short of running it."""
    for words in ALL:
        read_by_its_script(words)


@pytest.mark.parametrize("name", READMES)
def test_every_option_in_the_text_exists(name):
    known = "".join(help_of(script) for script in sorted({script_of(words) for words in ALL}) if script.endswith(".py"))
    for option in set(re.findall(r"`(--[a-z-]+)(?: [^`]*)?`", WHOLE[name])):
        assert re.search(rf"(^|[\s\[]){option}\b", known), f"no command has {option}"


@pytest.mark.parametrize("name", READMES)
def test_every_file_in_the_text_exists(name):
    text = TEXTS[name]
    links = re.findall(r"\]\(([^)#]+)\)", text)
    quoted = re.findall(r"`([\w./-]+\.(?:py|sh|yaml|json|md|txt))`", text)
    missing = []
    for path in {*links, *quoted} - {"dataset.json", "report.html", "fits.yaml"}:
        candidates = [ROOT / path, ROOT / "scripts" / path]
        if not any(candidate.exists() for candidate in candidates):
            missing.append(path)
    assert missing == []


@pytest.mark.parametrize("name", READMES)
def test_every_key_in_the_text_exists(name):
    keys = {dotted for dotted, _ in known_keys()}
    named = re.findall(r"`((?:data|autoencoder|ldm|device)\.[a-z_.]+)`", WHOLE[name])
    assert named
    assert [key for key in named if key not in keys] == []
    lines = set(re.findall(r"(?:[a-z_]+\.)+[a-z_]+=[^\s`]+(?: (?:[a-z_]+\.)+[a-z_]+=[^\s`]+)*", WHOLE[name]))
    assert len(lines) > 4
    for line in lines - {"section.key=value"}:
        load_settings(ROOT / "configs" / "default.yaml", line.split())


@pytest.mark.parametrize("names", [READMES, USING])
def test_translation_has_the_same_commands_links_and_headings(names):
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in names)
    assert commands(english) == commands(chinese)
    assert len(re.findall(r"^#+ ", english, re.MULTILINE)) == len(re.findall(r"^#+ ", chinese, re.MULTILINE))
    own = {Path(name).name for name in names}
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) - own for text in (english, chinese)]
    assert links[0] == links[1]
    tables = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in (english, chinese)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("name", READMES)
def test_shown_output_is_that_of_a_ladder_that_the_readme_runs(name):
    blocks = list(OUTPUT.finditer(TEXTS[name]))
    assert len(blocks) == TEXTS[name].count("```text")
    for block in blocks:
        words = tuple(shlex.split(block["command"]))
        assert words in ALL
        assert script_of(words) == "scripts/oom_ladder.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", READMES)
def test_shown_output_is_what_the_command_prints(name):
    for block in OUTPUT.finditer(TEXTS[name]):
        assert output_of(block["command"]) == block["output"], "run python -m scripts.dev.documents"


def test_symptoms_quote_what_the_program_says(tmp_path):
    config = tmp_path / "wrong.yaml"
    config.write_text("autoencoder:\n  training:\n    batch_sise: 2\n")
    with pytest.raises(ConfigError, match=r"unknown key; did you mean autoencoder\.training\.batch_size\?"):
        load_settings(config)
    assert "unknown key; did you mean" in WHOLE["README.md"]
    assert "in use by another process" in (ROOT / "training" / "run_setup.py").read_text()


def test_exit_codes_are_those_of_the_program():
    from runtime.cli import INTERRUPTED, OUT_OF_MEMORY

    for text in TEXTS.values():
        line = next(line for line in text.splitlines() if line.startswith(("Exit codes", "退出码")))
        assert [int(number) for number in re.findall(r"\d+", line)] == [0, argparse_exit(), OUT_OF_MEMORY, INTERRUPTED]


def argparse_exit() -> int:
    """Return argparse's exit code, which user errors share."""
    with pytest.raises(SystemExit) as ended:
        argparse.ArgumentParser(exit_on_error=True).parse_args(["--nonsense"])
    return int(str(ended.value.code))
