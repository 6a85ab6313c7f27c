"""Keys of conditions that do not go together are refused, each with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from settings import ConfigError, validate

LABELS = {"source": "maps", "num_classes": 3}
TARGET = {"source": "target", "encoding": "resample"}
BOTH_DEGRADED = TARGET | {"degrade": {"hole": [4, 16, 4], "downsample": [1, 3, 1]}}


@pytest.mark.parametrize(
    ("kind", "keys", "texts"),
    [
        ("label_map", {"source": "maps"}, ["label_map.num_classes: not set, and source is; allowed: both or neither"]),
        ("label_map", LABELS | {"num_classes": 1}, ["label_map.num_classes: 1 label value"]),
        ("label_map", {"num_classes": 3}, ["label_map.source: not set, and num_classes is"]),
        ("volume", {"encoding": "resample"}, ["volume.source: not set, and encoding is"]),
        ("volume", {"source": "ct"}, ["volume.encoding: not set, and source is"]),
        (
            "volume",
            {"source": "ct", "encoding": "autoencoder", "num_channels": 2},
            ["volume.num_channels: 2, and autoencoder.in_channels is 1"],
        ),
        (
            "volume",
            {"degrade": {"hole": [4, 4, 4]}},
            ["volume.degrade: hole with source None; allowed: one"],
        ),
        ("volume", TARGET, ["volume.degrade: nothing with source target"]),
        (
            "volume",
            BOTH_DEGRADED,
            [
                "volume.degrade: downsample and hole with source target",
                "volume.degrade.downsample: [1, 3, 1] does not divide data.voxel_size",
                "volume.degrade.hole: [4, 16, 4] on a grid of [16, 16, 16] voxels",
            ],
        ),
        ("tabular", {"continuous": ["age"]}, ["tabular.table: not set, and continuous is"]),
        ("tabular", {"table": "people.csv"}, ["tabular.continuous: not set, and table is"]),
        ("tabular", {"table": "t.csv", "continuous": ["age", "AGE"]}, ["tabular.continuous: column age named twice"]),
        ("scan", {"modality": 128}, ["scan.modality: found 128; allowed: below 128; for example null"]),
        ("scan", {"regions": ["chest", "leg"]}, ["scan.regions: found [chest, leg]"]),
    ],
)
def test_keys_of_one_kind_that_do_not_go_together_are_refused(tiny_values, kind, keys, texts):
    assert_refused(tiny_values, {kind: keys}, texts)


@pytest.mark.parametrize("kind", [{"label_map": LABELS}, {"scan": {"modality": 1}}])
def test_guidance_needs_conditions_that_training_hides(tiny_values, kind):
    tiny_values["ldm"]["sampling"] |= {"guidance_scale": 2.0}
    text = "2 with conditioning dropout 0, so the network never learns to predict without a condition"
    assert_refused(tiny_values, kind | {"dropout": 0.0}, [text])


def test_a_class_and_a_modality_cannot_share_their_embedding(tiny_values):
    text = "scan.modality: 8 with conditioning type class, which uses the same embedding"
    assert_refused(tiny_values, {"type": "class", "num_classes": 2, "scan": {"modality": 8}}, [text])


def assert_refused(values: dict[str, Any], conditioning: dict[str, Any], texts: list[str]) -> None:
    values["ldm"]["conditioning"] = conditioning
    with pytest.raises(ConfigError) as error:
        validate(values)
    for text in texts:
        assert text in str(error.value)
