"""Stored settings hold every key and a version; what this version cannot read is refused in one sentence."""

from __future__ import annotations

import pytest

from settings import CheckpointError, Settings, load_settings, migrations, restored, stored


def test_stored_settings_come_back_whatever_the_defaults_are():
    settings = Settings.model_validate({"name": "a", "autoencoder": {"training": {"kl_weight": 0.5}}})
    values = stored(settings)
    assert values["version"] == migrations.VERSION
    assert restored(values, "run.pt") == settings
    assert "version" in values, "what was read stays as it was"


@pytest.mark.parametrize(
    ("version", "text"), [(None, "no version"), (0, "version 0"), (99, "version 99"), ("x", "version x")]
)
def test_another_version_is_refused_with_a_way_out(version, text):
    values = stored(Settings()) | {"version": version}
    with pytest.raises(CheckpointError, match=rf"^run\.pt: its settings have {text}; allowed: 1; use the version"):
        restored(values, "run.pt")


def test_a_missing_or_unknown_key_is_named():
    values = stored(Settings())
    del values["ldm"]["sampling"]["sampler"]
    with pytest.raises(CheckpointError, match=r"its settings lack ldm\.sampling\.sampler; use the version"):
        restored(values, "run.pt")
    values = stored(Settings())
    values["data"]["label_maps"] = True
    with pytest.raises(CheckpointError, match=r"cannot be used; use the version .*\n.*data\.label_maps: unknown key"):
        restored(values, "run.pt")


def test_an_older_version_is_upgraded_step_by_step(monkeypatch, tmp_path):
    def rename(values):
        values["seed"] = values.pop("random_seed")

    monkeypatch.setattr(migrations, "VERSION", 2)
    monkeypatch.setitem(migrations.UPGRADES, 1, rename)
    values = Settings(seed=7).model_dump(mode="json") | {"version": 1}
    values["random_seed"] = values.pop("seed")
    assert restored(values, "run.pt").seed == 7
    path = tmp_path / "config.yaml"
    path.write_text("version: 1\nrandom_seed: 8\n")
    assert load_settings(path).seed == 8
