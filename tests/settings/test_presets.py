"""Every preset is short, has the keys of the others, loads, builds, and points editors at a current schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import Settings, known_keys, load_settings
from settings.section import is_section
from settings.yaml_reader import read_document

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


def test_the_presets_are_there_with_at_most_134_keys():
    assert {path.stem for path in PRESETS} >= {"default", "high_res", "balanced", "quality", "ultra_light"}
    assert len(LEAVES) <= 134


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_shows_the_keys_of_all_in_one_order_and_loads_for_both_stages(path):
    written = [name for name in read_document(path).lines if name in LEAVES]
    shared = [name for name in written if name not in OWN.get(path.stem, set())]
    assert shared == [name for name in read_document(ROOT / "configs" / "default.yaml").lines if name in LEAVES]
    assert set(written) - set(shared) == OWN.get(path.stem, set())
    assert len(path.read_text().splitlines()) <= 72
    for stage in ("autoencoder", "ldm"):
        assert load_settings(path, stage=stage).name == path.stem


def test_default_chooses_nothing():
    assert load_settings(ROOT / "configs" / "default.yaml") == Settings(name="default")


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


def test_automatic_norm_groups_are_those_of_the_guide_and_of_maisi():
    groups = {(32, 64, 64): 16, (16, 32, 64): 8, (24, 48, 64): 8, (12, 24, 48): 6, (64, 128, 256): 32}
    found = {channels: Settings.model_validate({"autoencoder": {"num_channels": channels}}) for channels in groups}
    assert {channels: settings.autoencoder.num_groups for channels, settings in found.items()} == groups


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
    assert found.training.learning_rate <= measured.training.learning_rate
