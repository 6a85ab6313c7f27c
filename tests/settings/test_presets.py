"""Presets are short, load, build and have the recipe; combinations and snippets of the memory guide change it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from settings import Settings, dump_short, dump_yaml, known_keys, load_settings, look_up, validate
from settings.load import read_document
from settings.section import assign, is_section
from tests.nested_values import leaves

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((ROOT / "configs").rglob("*.yaml"))
LEAVES = [name for name, field in known_keys() if not is_section(field)]
OWN = {
    "quickstart": {
        *("data.num_workers", "autoencoder.initialisation", "autoencoder.training.edge_weight"),
        *("autoencoder.training.validate_every", "autoencoder.training.save_every", "ldm.training.save_every"),
    },
    "maisi": {
        *("data.spacing", "data.resize", "autoencoder.variant"),
        *("ldm.unet.use_mean_map", "ldm.unet.resblock_updown", "ldm.unet.norm_num_groups"),
        *("ldm.scheduler.type", "ldm.scheduler.time_shift", "ldm.scheduler.prediction", "ldm.scheduler.schedule"),
        *("ldm.conditioning.scan.modality", "autoencoder.training.optimizer", "ldm.training.optimizer"),
    },
}
"""Keys that only one preset chooses."""


def test_the_presets_are_there_with_at_most_134_keys_and_default_chooses_nothing():
    assert {path.stem for path in PRESETS} >= {"default", "high_res", "balanced", "quality", "ultra_light"}
    assert len(LEAVES) <= 134
    assert load_settings(ROOT / "configs" / "default.yaml") == Settings(name="default")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_shows_the_keys_of_all_in_one_order_and_loads_for_both_stages(path):
    written = [name for name in read_document(path).lines if name in LEAVES]
    shared = [name for name in written if name not in OWN.get(path.stem, set())]
    assert shared == [name for name in read_document(ROOT / "configs" / "default.yaml").lines if name in LEAVES]
    assert set(written) - set(shared) == OWN.get(path.stem, set())
    assert len(path.read_text().splitlines()) <= 72
    for stage in ("autoencoder", "ldm"):
        assert load_settings(path, stage=stage).name == path.stem


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_run_folder_gets_every_key_and_a_short_file_what_a_preset_has(path, tmp_path):
    settings, written, short = load_settings(path), tmp_path / "config.yaml", tmp_path / "short.yaml"
    written.write_text(dump_yaml(settings))
    short.write_text(dump_short(settings, lambda dotted, field: field.description))
    assert load_settings(written) == load_settings(short) == settings
    assert set(read_document(written).lines) >= set(LEAVES)
    assert ("# default:" in written.read_text()) == (path.stem != "default")
    assert len(short.read_text().splitlines()) <= 75


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_tells_editors_its_schema_and_people_its_purpose_peak_and_command(path):
    text = path.read_text()
    head = text.split("\nname:")[0]
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert "# For: " in head
    assert ("# Stage 1: " in head and "# Stage 2: " in head) or path.stem == "quickstart"  # which is for a CPU
    assert f"python train_autoencoder.py --config configs/{path.stem}.yaml" in head
    assert "GiB" not in text.split("\nname:")[1], "figures stand only in the header, which is generated"


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_builds_on_the_meta_device(path):
    torch = pytest.importorskip("torch")
    from models import build_autoencoder, build_discriminator, build_unet

    settings = load_settings(path)
    with torch.device("meta"):
        assert build_autoencoder(settings.autoencoder)
        assert build_discriminator(settings.autoencoder)
        assert build_unet(settings.ldm, settings.autoencoder.latent_channels)


def test_automatic_norm_groups_are_those_of_the_guide_and_of_maisi_and_attention_is_in_the_middle_if_anywhere():
    groups = {(32, 64, 64): 16, (16, 32, 64): 8, (24, 48, 64): 8, (12, 24, 48): 6, (64, 128, 256): 32}
    found = {channels: Settings.model_validate({"autoencoder": {"num_channels": channels}}) for channels in groups}
    assert {channels: settings.autoencoder.num_groups for channels, settings in found.items()} == groups
    assert not validate({"autoencoder": {"attention_levels": [False] * 3}}).autoencoder.has_middle_attention


FINE_TUNED = {"maisi"}
"""Presets that start from a published U-Net, whose recipe they keep."""


@pytest.mark.parametrize("path", [path for path in PRESETS if path.stem not in FINE_TUNED], ids=lambda path: path.stem)
def test_every_preset_has_the_recipe_of_stage_two_that_was_measured_with_quickstart(path):
    found, measured = (load_settings(file).ldm for file in (path, ROOT / "configs" / "quickstart.yaml"))
    assert found.scheduler == measured.scheduler
    assert found.sampling.sampler == measured.sampling.sampler
    for name in ("learning_rate_decay", "ema_decay", "max_grad_norm"):
        assert getattr(found.training, name) == getattr(measured.training, name), name
    # Wider networks need a smaller learning rate; how much smaller was not measured.
    assert found.training.rate_from(None) <= measured.training.rate_from(None)


COMBINATION = """
autoencoder:
  num_channels: {}
  norm_num_groups: {}
  attention_levels: {}
  training:
    batch_size: {}
    use_perceptual_loss: {}
    use_gradient_checkpointing: {}
    gradient_accumulation_steps: {}
    discriminator:
      num_layers_d: {}
      num_channels: {}
device:
  mixed_precision: true
"""
A = COMBINATION.format([16, 32, 64], 8, "[false, false, true]", 1, "false", "true", 4, 2, 16)
B = COMBINATION.format([24, 48, 64], 8, "[false, false, true]", 2, "true", "false", 2, 3, 24)
C = COMBINATION.format([32, 64, 128], 16, "[false, true, true]", 4, "true", "false", 1, 3, 32)
SNIPPETS = [
    "device:\n  mixed_precision: true",
    "autoencoder:\n  training:\n    use_perceptual_loss: false",
    "autoencoder:\n  training:\n    batch_size: 1\n    gradient_accumulation_steps: 4",
    "autoencoder:\n  training:\n    use_gradient_checkpointing: true",
    "autoencoder:\n  num_channels: [16, 32, 64]\n  norm_num_groups: 8",
    "autoencoder:\n  training:\n    discriminator:\n      num_layers_d: 2\n      num_channels: 16",
    "autoencoder:\n  attention_levels: [false, false, false]",
    "autoencoder:\n  attention_levels: [false, false, true]",
    "data:\n  cache_rate: 0",
    "data:\n  voxel_size: [256, 256, 64]",
    "autoencoder:\n  num_channels: [12, 24, 48]",
    "data:\n  voxel_size: [128, 128, 64]",
]
FIVE_LINES = "name: mine\ndata:\n  source: /data/ct\n  voxel_size: [128, 128, 64]\n"
DIAGNOSIS = [SNIPPETS[0], SNIPPETS[2], SNIPPETS[1], *SNIPPETS[10:11], SNIPPETS[3], SNIPPETS[11]]
"""The six steps that the guide goes through when memory runs out."""


def resolved(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "pasted.yaml"
    path.write_text(text)
    return load_settings(path, stage="autoencoder").model_dump(mode="json")


@pytest.mark.parametrize("text", [FIVE_LINES, A, B, C, *SNIPPETS])
def test_pasted_into_an_empty_file_it_is_the_recipe_but_for_what_it_sets(tmp_path, text):
    assert resolved(tmp_path, text) == expected(text)


def expected(*texts: str) -> dict[str, Any]:
    """Return the recipe, which is what `default` trains, with the values of some texts."""
    values = load_settings("configs/default.yaml").model_dump(mode="json") | {"name": "pasted"}
    for text in texts:
        for dotted, value in leaves(yaml.safe_load(text)):
            assign(values, dotted, value)
    return values


def test_the_six_steps_of_the_diagnosis_go_together_and_after_each_combination(tmp_path):
    for start in ("", A, B, C):
        merged: dict[str, Any] = {}
        for text in (start, *DIAGNOSIS):
            for dotted, value in leaves(yaml.safe_load(text) or {}):
                assign(merged, dotted, value)
        # Twelve channels are not divided by the groups that the combinations name.
        if start:
            merged["autoencoder"]["norm_num_groups"] = "auto"
        assert resolved(tmp_path, yaml.safe_dump(merged)) == expected(yaml.safe_dump(merged))


@pytest.mark.parametrize(("preset", "text"), [("high_res", A), ("balanced", B), ("quality", C)])
def test_preset_has_the_mathematics_of_its_combination(preset, text):
    promises = {name: (field.json_schema_extra or {}).get("promise") for name, field in known_keys()}
    settings = load_settings(f"configs/{preset}.yaml")
    values = settings.model_dump(mode="json")
    values["autoencoder"]["norm_num_groups"] = settings.autoencoder.num_groups
    found = values["autoencoder"]["training"]
    assert found["batch_size"] * found["gradient_accumulation_steps"] == 4
    for dotted, value in leaves(yaml.safe_load(text)):
        assert look_up(values, dotted) == value or promises[dotted] == "same mathematics", dotted
