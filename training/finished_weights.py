"""Weight files of a run: those it starts from, those of its best validation, and the finished ones."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from torch import nn

from models.frozen_autoencoder import check_pretrained
from models.weight_files import load_into, load_texts, load_weights, save_weights
from runtime.files import RunFolder
from settings import AutoencoderSettings, CheckpointError, Settings, stored
from training.checkpoints import Checkpoints
from training.step import TrainingStep

log = logging.getLogger(__name__)


def ensure_pretrained(autoencoder: AutoencoderSettings) -> None:
    """Raise `CheckpointError` if the weights to start from cannot be used, before anything slow happens."""
    if autoencoder.pretrained is not None:
        path = Path(autoencoder.pretrained)
        check_pretrained(autoencoder, load_weights(path)[1], path)


def load_pretrained(networks: dict[str, nn.Module], path: Path) -> None:
    """Load the autoencoder from `path`, and the other networks from files beside it if those exist."""
    for name, network in networks.items():
        file = path if name == "autoencoder" else path.with_name(f"{name}.safetensors")
        if file != path and not file.exists():
            log.info("%s: not found, so the %s starts from random weights", file, name)
            continue
        load_into(network, file)
        log.info("%s: the %s starts from these weights", file, name)


def export(step: TrainingStep, run: RunFolder) -> None:
    """Write the stage's main network, with averaged weights if there are any, and log the next command."""
    if not step.process.is_rank_zero:
        return
    path = run.weights(step.stage)
    # The last step was saved before. A run that goes on later has checkpoints of further steps.
    _write(step, path, {"step": Checkpoints(run.checkpoints, step.stage, keep=2).newest_step()})
    log.info("%s: finished weights of stage %s", path, step.stage)
    log.info("next: %s", step.next_command(run))


class BestWeights:
    """Writes the weights again whenever a validation is better than all before it: by PSNR, or by diffusion loss.

    The file also holds the best value, so a resumed run compares with it. A new run removes the file. A value that is
    not finite is never the best.
    """

    def __init__(self, step: TrainingStep, run: RunFolder, first_step: int) -> None:
        self.step = step
        self.path = run.best_weights(step.stage)
        self.name, self.sign = step.best_metric, 1 if step.higher_is_better else -1
        self.best: float | None = None
        if step.process.is_rank_zero and first_step == 0:
            self.path.unlink(missing_ok=True)
        elif step.process.is_rank_zero and self.path.is_file():
            try:
                self.best = load_weights(self.path)[1].get(self.name)
            except CheckpointError:  # training does not need the file
                log.warning("%s: damaged; only validations from here on count for the best weights", self.path)

    def __call__(self, done: int, metrics: dict[str, float]) -> None:
        """Keep the weights if the metrics of the validation after `done` steps are the best so far."""
        value = metrics.get(self.name)
        if value is None or not math.isfinite(value) or not self.step.process.is_rank_zero:
            return
        if self.best is None or self.sign * value > self.sign * self.best:
            self.best = value
            _write(self.step, self.path, {"step": done, self.name: value})


def _write(step: TrainingStep, path: Path, facts: dict[str, Any]) -> None:
    with step.inference_weights():
        own = {"stage": step.stage, "settings": stored(step.settings)}
        save_weights(
            path, step.network.state_dict(), own | licence_of(step.stage, step.settings) | step.metadata | facts
        )


def licence_of(stage: str, settings: Settings) -> dict[str, str]:
    """Return the licence of the weights that a run was fine-tuned from, if they name one."""
    section = settings.autoencoder if stage == "autoencoder" else settings.ldm
    if section.pretrained is None or not Path(section.pretrained).is_file():
        return {}
    licence = load_texts(Path(section.pretrained)).get("licence")
    return {} if licence is None else {"licence": licence}
