"""What a run says first and last: its summary, and the next command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.files import RunFolder
from runtime.processes import Process
from settings import Settings
from training.ldm_step import LatentDiffusionStep
from training.run_setup import summarise


def test_the_summary_says_how_long_a_run_is_and_over_how_many_volumes(tiny_values):
    limited = Settings.model_validate(tiny_values).with_overrides({"ldm.training.max_hours": 0.25})
    assert "stage ldm, 15 min 0 s\n" in summarise(limited, "ldm", 1)
    assert summarise(limited, "ldm", 1).endswith("over 1 training volume")


CPU = Process(torch.device("cpu"))
TARGET = {"encoding": "resample", "source": "target"}


@pytest.mark.parametrize(
    ("conditioning", "expected"),
    [
        ({}, ""),
        ({"label_map": {"source": "maps", "num_classes": 3}}, " --labels FILE_OR_FOLDER"),
        ({"volume": TARGET | {"degrade": {"downsample": [1, 1, 2]}}}, " --condition FILE_OR_FOLDER"),
        (
            {"volume": TARGET | {"degrade": {"hole": [4, 4, 4]}}},
            " --condition FILE_OR_FOLDER --mask FILE_OR_FOLDER",
        ),
    ],
)
def test_the_next_command_names_the_conditions_of_the_run(tiny_values, conditioning, expected):
    tiny_values["ldm"]["conditioning"] = conditioning
    step = LatentDiffusionStep(Settings.model_validate(tiny_values), CPU, load_weights=False)
    assert step.next_command(RunFolder(Path("runs/a b"))) == f"python scripts/sample.py --run 'runs/a b'{expected}"
