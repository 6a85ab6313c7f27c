"""What README says exists: commands, options, files, config keys, exit codes; and its translation says the same."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from settings import ConfigError, load_settings
from settings.load import known_keys

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-CN.md")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in READMES}


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    lines = [line for block in fenced(text, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


ALL = sorted({tuple(words) for text in TEXTS.values() for words in commands(text)})


def script_of(words: tuple[str, ...]) -> str:
    return next(word for word in words if word.endswith((".py", ".sh")))


def test_readme_has_the_two_commands_first():
    first, second, *_ = commands(TEXTS["README.md"])
    assert first == ["bash", "scripts/quickstart.sh"]
    assert second == ["bash", "scripts/test.sh"]
    assert len(ALL) >= 10


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_command_is_accepted_by_its_script(words):
    """Options exist, configs load, overrides are valid: everything short of running it."""
    script = script_of(words)
    assert (ROOT / script).is_file()
    given = list(words[words.index(script) + 1 :])
    if script.endswith(".sh"):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
        return
    help_text = subprocess.run(
        [sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    for word in given:
        if word.startswith("--"):
            assert re.search(rf"(^|[\s\[]){re.escape(word)}\b", help_text), f"{script} has no {word}"
    if "--config" in given:
        config = given[given.index("--config") + 1]
        overrides = [word for word in given if re.fullmatch(r"[a-z_.]+=.+", word)]
        load_settings(ROOT / config, overrides)


@pytest.mark.parametrize("name", READMES)
def test_every_file_that_is_named_exists(name):
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
def test_every_key_that_is_named_is_a_key(name):
    keys = {dotted for dotted, _ in known_keys()}
    named = re.findall(r"`((?:data|autoencoder|ldm|device)\.[a-z_.]+)`", TEXTS[name])
    assert named
    assert [key for key in named if key not in keys] == []
    for line in set(re.findall(r"`((?:[a-z_]+\.)+[a-z_]+=[^`]+)`", TEXTS[name])) - {"section.key=value"}:
        load_settings(ROOT / "configs" / "default.yaml", line.split())


def test_translation_has_the_same_commands_links_and_headings():
    english, chinese = (TEXTS[name] for name in READMES)
    assert commands(english) == commands(chinese)
    assert len(re.findall(r"^#+ ", english, re.MULTILINE)) == len(re.findall(r"^#+ ", chinese, re.MULTILINE))
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) - set(READMES) for text in (english, chinese)]
    assert links[0] == links[1]
    tables = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in (english, chinese)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("name", READMES)
def test_shown_output_is_of_the_command_above_it(name):
    blocks = re.findall(r"<!-- output of: (.+?) -->\n```text\n(.*?)```", TEXTS[name], re.DOTALL)
    assert blocks
    for command, output in blocks:
        assert tuple(shlex.split(command)) in ALL
        assert "as configured" in output, "run python dev/readme_output.py"
        assert "Recommended:" in output


def test_symptoms_quote_what_the_program_says(tmp_path):
    config = tmp_path / "wrong.yaml"
    config.write_text("autoencoder:\n  training:\n    batch_sise: 2\n")
    with pytest.raises(ConfigError, match=r"unknown key; did you mean autoencoder\.training\.batch_size\?"):
        load_settings(config)
    assert "unknown key; did you mean" in TEXTS["README.md"]
    assert "in use by another process" in (ROOT / "training" / "run_folder.py").read_text()


def test_every_preset_points_editors_at_the_schema():
    presets = sorted((ROOT / "configs").glob("*.yaml"))
    assert presets
    for preset in presets:
        assert preset.read_text().startswith("# yaml-language-server: $schema=schema.json\n"), preset.name


def test_exit_codes_are_the_programs():
    from command_line import INTERRUPTED, OUT_OF_MEMORY

    for text in TEXTS.values():
        line = next(line for line in text.splitlines() if line.startswith(("Exit codes", "退出码")))
        assert [int(number) for number in re.findall(r"\d+", line)] == [0, argparse_exit(), OUT_OF_MEMORY, INTERRUPTED]


def argparse_exit() -> int:
    """Users' mistakes share argparse's code."""
    with pytest.raises(SystemExit) as ended:
        argparse.ArgumentParser(exit_on_error=True).parse_args(["--nonsense"])
    return int(str(ended.value.code))
