"""What the fault and fuzz campaigns share: the config that they train, and how they report."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
from pathlib import Path
from typing import Any

from runtime.cli import at_least
from tests.support.tiny_config import TINY

NUM_STEPS = 24


def _config(num_steps: int) -> dict[str, Any]:
    values = copy.deepcopy(TINY) | {"name": "campaign", "seed": 3}
    # Save at other steps than those that validate.
    for stage in ("autoencoder", "ldm"):
        values[stage]["training"] |= {"max_steps": num_steps, "validate_every": 8, "save_every": 3, "ema_decay": 0.9}
    values["autoencoder"]["training"]["adversarial_start_step"] = 4
    values["ldm"]["sampling"] = {"num_inference_steps": 2}
    return values


CONFIG = _config(NUM_STEPS)


def write_config(folder: Path, num_steps: int = NUM_STEPS) -> None:
    """Write the config as campaign.yaml."""
    import yaml

    (folder / "campaign.yaml").write_text(yaml.safe_dump(_config(num_steps)))


def add_campaign(target: argparse.ArgumentParser, unit: str) -> None:
    """Add the arguments that both campaigns take."""
    target.add_argument("--seed", type=int, default=0, help="seed of all random choices (0)")
    target.add_argument("--jobs", type=at_least(0), default=0, help=f"{unit} at a time; 0: as many as there are cores")
    target.add_argument("--write", metavar="FILE", help="also write the result there, as Markdown")


def num_jobs(options: argparse.Namespace) -> int:
    """Return how many commands run at a time."""
    return options.jobs or len(os.sched_getaffinity(0))


def conclude(text: str, failures: list[str], folder: Path, options: argparse.Namespace) -> int:
    """Print and write the result and return the exit code; keep the folder after a failure, for inspection."""
    print(text)
    if options.write is not None:
        Path(options.write).write_text(text, encoding="utf-8")
    if failures:
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0
