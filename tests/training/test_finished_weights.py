"""What the end of a stage says to run next."""

from __future__ import annotations

import pytest

from settings import Settings
from training.finished_weights import _options

TARGET = {"encoding": "resample", "source": "target"}


@pytest.mark.parametrize(
    ("conditioning", "expected"),
    [
        ({}, []),
        ({"label_map": {"source": "maps", "num_classes": 3}}, ["--labels FILE_OR_FOLDER"]),
        ({"volume": TARGET | {"degrade": {"downsample": [1, 1, 2]}}}, ["--condition FILE_OR_FOLDER"]),
        (
            {"volume": TARGET | {"degrade": {"hole": [4, 4, 4]}}},
            ["--condition FILE_OR_FOLDER", "--mask FILE_OR_FOLDER"],
        ),
    ],
)
def test_the_next_command_names_the_conditions_of_the_run(tiny_values, conditioning, expected):
    tiny_values["ldm"]["conditioning"] = conditioning
    assert _options(Settings.model_validate(tiny_values)) == expected
