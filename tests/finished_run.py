"""A tiny run with both stages, made once for all tests that look at one; the autoencoder is untrained but exported."""

from __future__ import annotations

import contextlib
import copy
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from settings import Settings, load_settings
from tests.conftest import ROOT
from tests.support.tiny_config import TINY


def export_autoencoder(values: dict[str, Any], latent_gain: float = 1.0) -> None:
    """Write the autoencoder that a run would begin with, as if stage 1 were finished, into runs/ of this folder.

    `latent_gain` multiplies the encoder's output and divides the decoder's input.
    """
    from runtime.processes import Process, processes
    from training.autoencoder_step import AutoencoderStep
    from training.checkpoints import export
    from training.run_setup import describe_run, open_run

    settings = Settings.model_validate(values)
    with processes(settings) as process, open_run(settings, process) as folder:
        step = AutoencoderStep(settings, Process(torch.device("cpu")))
        with torch.no_grad():
            step.autoencoder.quant_conv_mu.conv.weight.mul_(latent_gain)
            step.autoencoder.quant_conv_mu.conv.bias.mul_(latent_gain)
            step.autoencoder.post_quant_conv.conv.weight.div_(latent_gain)
        export(step, folder)
        describe_run(folder, settings, process)


def train_ldm(config: Path, *overrides: str) -> int:
    """Run train_ldm.py in this process and this folder."""
    from train_ldm import train

    return train(load_settings(config, overrides, stage="ldm"), is_dry_run=False)


def run_here(script: str, *arguments: str | Path) -> int:
    """Run a script of the project in this process and folder, without the time of imports; return its exit code."""
    before = sys.argv
    sys.argv = [script, *map(str, arguments)]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def _make(folder: Path) -> Path:
    values = copy.deepcopy(TINY)
    values["data"]["source"] = "phantoms:9"
    values["data"]["val_fraction"] = 0.3
    values["ldm"]["conditioning"] = {"type": "class", "num_classes": 3}
    config = folder / "tiny.yaml"
    config.write_text(yaml.safe_dump(values))
    with contextlib.chdir(folder):
        export_autoencoder(values)
        train_ldm(config)
    return folder / "runs" / "tiny"


_made: list[Path] = []


def finished_run(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run, made at the first call."""
    if not _made:
        _made.append(_make(factory.mktemp("finished")))
    return _made[0]
