"""Stage 1 warns of a config that stage 2 would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data import DataSplit, VolumeFile
from runtime.processes import Process
from settings import Settings
from training.summary import warn_of_stage_two

FILES = tuple(VolumeFile(Path(f"{name}.nii"), name, label) for label, name in enumerate(("a", "b")))
VOLUMES = DataSplit(FILES[:1], FILES[1:], ("healthy", "lesion"))


def warnings(values: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    warn_of_stage_two(Settings.model_validate(values), VOLUMES, Process(torch.device("cpu")))
    return [record.getMessage() for record in caplog.records]


def test_config_that_both_stages_accept_gives_no_warning(tiny_values, caplog):
    assert warnings(tiny_values, caplog) == []


def test_grid_that_stage_two_will_refuse_is_reported_in_stage_one(tiny_values, caplog):
    tiny_values["data"]["voxel_size"] = [18, 16, 16]
    (said,) = warnings(tiny_values, caplog)
    assert said.startswith(
        "stage 2 will refuse this config: ldm.unet.num_channels: 2 levels need latents divisible by 2"
    )
    assert "nearest [16, 16, 16]" in said
    tiny_values["ldm"]["latents"] = {"pad": True}
    assert warnings(tiny_values, caplog) == []


def test_wrong_number_of_classes_is_reported_in_stage_one(tiny_values, caplog):
    tiny_values["ldm"]["conditioning"] = {"type": "class", "num_classes": 3}
    (said,) = warnings(tiny_values, caplog)
    assert "ldm.conditioning.num_classes: 3, but the data has 2 (healthy, lesion)" in said
