"""Stage 2 as a user runs it: killed and resumed bit for bit, on the right autoencoder, with readable errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from settings import CheckpointError
from tests.finished_run import export_autoencoder, finished_run, run_here, train_ldm
from training.validation.skill import NUM_LEVELS


@pytest.fixture
def prepared(tmp_path, monkeypatch, tiny_config, tiny_values) -> Path:
    """A folder in which stage 1 is finished."""
    monkeypatch.chdir(tmp_path)
    export_autoencoder(tiny_values)
    return tiny_config


def test_a_finished_run_has_everything_that_sampling_needs(tmp_path_factory):
    run = finished_run(tmp_path_factory)
    with safe_open(run / "ldm.safetensors", framework="pt") as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items()}
    assert metadata["stage"] == "ldm"
    scale = load_file(run / "ldm.safetensors")["metadata.latent_scale"]
    assert (scale > 0).all()
    assert metadata["class_names"] == ["healthy", "lesion", "ventricles"]
    assert metadata["spacing_mm"] == pytest.approx([200 / 16, 240 / 16, 200 / 16])
    assert len(metadata["lower"]) == len(metadata["upper"]) == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "diffusion" in line] == [1, 2, 3, 4]
    [validation] = [line for line in lines if "val_diffusion" in line]
    assert validation["step"] == 4
    assert sum(name.startswith("val_skill_") for name in validation) == NUM_LEVELS
    assert (run / "previews" / "ldm_00000004.png").is_file()
    checkpoint = torch.load(next((run / "checkpoints").glob("ldm_step_00000004*")), weights_only=True)
    assert torch.equal(checkpoint["latent_scale"], scale)


def test_a_dry_run_needs_no_autoencoder_and_training_does(tiny_config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_here("train_ldm.py", "--config", tiny_config, "--dry-run") == 0
    assert "stage ldm, 4 steps" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "tiny").exists()
    assert run_here("train_ldm.py", "--config", tiny_config) == 2
    said = capsys.readouterr().err
    assert "autoencoder.safetensors: no trained autoencoder; train stage 1" in said
    # Nothing is prepared for a run that cannot start.
    assert "volume" not in said
    assert not list((tmp_path / "runs").rglob("*.volume"))


def test_an_autoencoder_of_other_settings_is_refused_with_the_keys_that_differ(prepared, tiny_values):
    tiny_values["autoencoder"]["num_channels"] = [16, 16]
    tiny_values["data"]["intensity"] = {"mode": "window", "lower": 0.0, "upper": 1000.0}
    prepared.write_text(yaml.safe_dump(tiny_values))
    with pytest.raises(CheckpointError) as error:
        train_ldm(prepared)
    assert "autoencoder.num_channels: [8, 16] -> [16, 16]" in str(error.value)
    assert "data.intensity:" in str(error.value)


def test_weights_named_by_path_are_used_and_wrong_ones_refused(prepared, tiny_values, tmp_path):
    given = tmp_path / "given.safetensors"
    Path("runs/tiny/autoencoder.safetensors").rename(given)
    assert train_ldm(prepared, f"ldm.autoencoder={given}", "ldm.training.max_steps=1") == 0
    # Another one is not resumed on.
    export_autoencoder(tiny_values | {"seed": 8})
    with pytest.raises(CheckpointError, match="autoencoder with other weights"):
        train_ldm(prepared, "ldm.training.max_steps=2")
    given.write_bytes(b"not weights")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        train_ldm(prepared, f"ldm.autoencoder={given}")
