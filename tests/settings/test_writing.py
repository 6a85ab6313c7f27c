"""Settings as text: of a run, of a plan, with origins, and as checkpoints store them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from settings import (
    CheckpointError,
    Settings,
    dump_short,
    dump_with_origins,
    dump_yaml,
    known_keys,
    load_settings,
    restored,
    stored,
)
from settings.section import is_section
from settings.yaml_reader import read_document
from tests.conftest import ROOT

PRESETS = sorted(Path("configs").glob("*.yaml"))
LEAVES = {name for name, field in known_keys() if not is_section(field)}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_run_folder_gets_every_key_and_a_short_file_what_a_preset_has(path, tmp_path):
    settings, written, short = load_settings(path), tmp_path / "config.yaml", tmp_path / "short.yaml"
    written.write_text(dump_yaml(settings))
    short.write_text(dump_short(settings, lambda dotted, field: field.description))
    assert load_settings(written) == load_settings(short) == settings
    assert set(read_document(written).lines) >= LEAVES
    assert ("# default:" in written.read_text()) == (path.stem != "default")
    assert len(short.read_text().splitlines()) <= 75


def test_odd_values_survive(tmp_path):
    odd = {"source": "a: #b\nc 'd' \"e\" \u00e9 - [x]", "group_by": "sub-\\d+ # {}"}
    settings = Settings.model_validate({"data": odd, "ldm": {"training": {"learning_rate": 1e-7}}})
    for text in (dump_yaml(settings), dump_short(settings)):
        (tmp_path / "run.yaml").write_text(text)
        assert load_settings(tmp_path / "run.yaml") == settings


def test_each_value_says_where_it_comes_from(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data:\n  voxel_size: [32, 32, 32]\n  cache_rate: 1\nldm: {training: {max_steps: 5}}\n")
    lines = dump_with_origins(path, ["seed=3", "data.intensity={mode: window}"]).splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if "# " in line:
            found.setdefault(line.split(":")[0].strip(), line.split("# ")[1])
    assert found["name"] == "name of the file"
    assert (found["seed"], found["mode"], found["upper"]) == ("command line",) * 3
    assert (found["voxel_size"], found["prepared"]) == ("mine.yaml, line 2", "mine.yaml, line 3")
    assert found["spacing"] == "default"


@pytest.mark.parametrize("script", ["train_autoencoder.py", "train_ldm.py"])
def test_print_config_prints_a_loadable_config_and_stops(script, tmp_path):
    config = ROOT / "configs" / "quickstart.yaml"
    options = ("--config", config, "--print-config", "data.num_workers=2", "--hours", "1")
    said = subprocess.run(
        [sys.executable, ROOT / script, *options], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "printed.yaml").write_text(said)
    stage = script.removeprefix("train_").removesuffix(".py")
    changes = {"data.num_workers": 2, f"{stage}.training.max_hours": 1.0}
    assert load_settings(tmp_path / "printed.yaml") == load_settings(config).with_overrides(changes)
    assert "# command line" in said
    assert not (tmp_path / "runs").exists()


def test_stored_settings_come_back_whatever_the_defaults_are():
    settings = Settings.model_validate({"name": "a", "autoencoder": {"training": {"kl_weight": 0.5}}})
    assert restored(stored(settings), "run.pt") == settings


def test_a_missing_or_unknown_key_is_named():
    values = stored(Settings())
    del values["ldm"]["sampling"]["sampler"]
    with pytest.raises(CheckpointError, match=r"its settings lack ldm\.sampling\.sampler; use the version"):
        restored(values, "run.pt")
    values = stored(Settings())
    values["data"]["label_maps"] = True
    with pytest.raises(CheckpointError, match=r"cannot be used; use the version .*\n.*data\.label_maps: unknown key"):
        restored(values, "run.pt")
