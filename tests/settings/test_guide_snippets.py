"""Combinations and snippets of the memory guide work when pasted into the section they belong to."""

from __future__ import annotations

import pytest

from settings import load_settings, look_up
from tests.nested_values import leaves

COMBINATION_A = """
autoencoder:
  num_channels: [16, 32, 64]
  norm_num_groups: 8
  attention_levels: [false, false, true]

  training:
    batch_size: 1
    use_perceptual_loss: false
    use_gradient_checkpointing: true
    gradient_accumulation_steps: 4

    discriminator:
      num_layers_d: 2
      num_channels: 16

device:
  mixed_precision: true
"""
COMBINATION_B = """
autoencoder:
  num_channels: [24, 48, 64]
  norm_num_groups: 8
  attention_levels: [false, false, true]

  training:
    batch_size: 2
    use_perceptual_loss: true
    use_gradient_checkpointing: false
    gradient_accumulation_steps: 2

    discriminator:
      num_layers_d: 3
      num_channels: 24

device:
  mixed_precision: true
"""
COMBINATION_C = """
autoencoder:
  num_channels: [32, 64, 128]
  norm_num_groups: 16
  attention_levels: [false, true, true]

  training:
    batch_size: 4
    use_perceptual_loss: true
    use_gradient_checkpointing: false
    gradient_accumulation_steps: 1

    discriminator:
      num_layers_d: 3
      num_channels: 32

device:
  mixed_precision: true
"""
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


@pytest.mark.parametrize("text", [COMBINATION_A, COMBINATION_B, COMBINATION_C, *SNIPPETS])
def test_pasted_text_is_a_valid_config(tmp_path, text):
    path = tmp_path / "pasted.yaml"
    path.write_text(text)
    assert load_settings(path, stage="autoencoder").name == "pasted"


@pytest.mark.parametrize(
    ("preset", "text"), [("high_res", COMBINATION_A), ("balanced", COMBINATION_B), ("quality", COMBINATION_C)]
)
def test_preset_has_the_mathematics_of_its_combination(tmp_path, preset, text):
    import yaml

    from settings import known_keys

    promises = {name: (field.json_schema_extra or {}).get("promise") for name, field in known_keys()}
    settings = load_settings(f"configs/{preset}.yaml").model_dump(mode="json")

    found = settings["autoencoder"]["training"]
    assert found["batch_size"] * found["gradient_accumulation_steps"] == 4
    for dotted, value in leaves(yaml.safe_load(text)):
        assert look_up(settings, dotted) == value or promises[dotted] == "same mathematics", dotted


def test_disabling_attention_on_every_level_disables_the_middle_attention(tmp_path):
    path = tmp_path / "none.yaml"
    path.write_text("autoencoder:\n  attention_levels: [false, false, false]")
    assert not load_settings(path).autoencoder.has_middle_attention
