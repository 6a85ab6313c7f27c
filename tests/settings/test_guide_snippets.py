"""Combinations and snippets of the memory guide, and a config of five lines, are the recipe but for what they set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from settings import known_keys, load_settings, look_up, validate
from settings.section import assign
from tests.nested_values import leaves

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


def test_disabling_attention_on_every_level_disables_the_middle_attention():
    assert not validate({"autoencoder": {"attention_levels": [False] * 3}}).autoencoder.has_middle_attention


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
