"""Every preset is complete, loads, builds, and points editors at a schema that is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dev.documents.reference import configuration_reference, json_schema
from settings import known_keys, load_settings
from settings.yaml_reader import read_document

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((ROOT / "configs").rglob("*.yaml"))


def test_the_six_presets_are_there():
    names = {path.stem for path in PRESETS}
    assert names >= {"default", "high_res", "balanced", "quality", "ultra_light", "quickstart"}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_holds_every_key_and_loads_for_both_stages(path):
    written = read_document(path).lines
    assert [name for name, _ in known_keys() if name not in written] == []
    for stage in ("autoencoder", "ldm"):
        assert load_settings(path, stage=stage).name == path.stem


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_tells_editors_its_schema_and_people_its_purpose_peak_and_command(path):
    text = path.read_text()
    head = text.split("name:")[0]
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert "# For: " in head
    assert "# Predicted peak: " in head
    assert f"python train_autoencoder.py --config configs/{path.stem}.yaml" in head
    assert "# same mathematics" in text
    assert "# different mathematics" in text


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_builds_on_the_meta_device(path):
    torch = pytest.importorskip("torch")
    from models import build_autoencoder, build_discriminator, build_unet

    settings = load_settings(path)
    with torch.device("meta"):
        assert build_autoencoder(settings.autoencoder)
        assert build_discriminator(settings.autoencoder)
        assert build_unet(settings.ldm, settings.autoencoder.latent_channels)


FINE_TUNED = {"maisi"}
"""Presets that start from a published U-Net, whose recipe they keep."""


@pytest.mark.parametrize("path", [path for path in PRESETS if path.stem not in FINE_TUNED], ids=lambda path: path.stem)
def test_every_preset_has_the_recipe_of_stage_two_that_was_measured_with_quickstart(path):
    found, measured = (load_settings(file).ldm for file in (path, ROOT / "configs" / "quickstart.yaml"))
    assert found.scheduler == measured.scheduler
    assert found.sampling.sampler == measured.sampling.sampler
    for name in ("learning_rate_decay", "ema_length", "max_grad_norm", "loss_weighting", "weight_decay"):
        assert getattr(found.training, name) == getattr(measured.training, name), name
    # Wider networks need a smaller learning rate; how much smaller was not measured.
    assert found.training.learning_rate <= measured.training.learning_rate


def test_generated_documents_are_current():
    advice = "run python dev/generate_documents.py"
    assert (ROOT / "configs" / "schema.json").read_text() == json_schema(), advice
    assert (ROOT / "docs" / "configuration.md").read_text() == configuration_reference(), advice


def test_schema_forbids_unknown_keys_in_every_section():
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())
