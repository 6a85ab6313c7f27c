"""Keeps the number of volumes per update of a run that resumes on another number of ranks."""

from __future__ import annotations

import logging
from typing import Any

import torch

from runtime.files.reading import check_regular
from runtime.files.run_folder import RUNS, RunFolder
from runtime.processes import Process
from settings import CheckpointError, Settings, restored
from settings.errors import AMBIGUOUS_READ_ERRORS, READ_ERRORS

log = logging.getLogger(__name__)


def for_ranks(settings: Settings, stage: str, process: Process) -> Settings:
    """Return the settings with the gradient accumulation that keeps the volumes per update of the run's checkpoint.

    Where the config changed since the checkpoint, it is left as it is, and resuming judges it. Raise `CheckpointError`
    on all ranks if they cannot share an update equally.
    """
    with process.raise_on_all_ranks():
        steps = _accumulation(settings, stage, process.world_size) if process.is_rank_zero else None
    steps = process.broadcast(steps)
    if steps is None:
        return settings
    key = f"{stage}.training.gradient_accumulation_steps"
    configured = settings.training_of(stage).gradient_accumulation_steps
    log.info(
        "%s: %d -> %d, so that an update on %d ranks has as many volumes as before",
        key, configured, steps, process.world_size,
    )  # fmt: skip
    return settings.with_overrides({key: steps})


def _accumulation(settings: Settings, stage: str, num_ranks: int) -> int | None:
    """Return the accumulation that the checkpoint asks for; None: the configured one, or there is no checkpoint."""
    training = settings.training_of(stage)
    state = _any_checkpoint(settings.name, stage)
    if not {"settings", "samples_per_update"} <= state.keys():
        return None
    before = restored(state["settings"], RUNS / settings.name).training_of(stage)
    samples, size, steps = state["samples_per_update"], training.batch_size, training.gradient_accumulation_steps
    is_as_before = size * steps == before.batch_size * before.gradient_accumulation_steps
    if not is_as_before or size * steps * num_ranks == samples:
        return None
    if samples % (size * num_ranks):
        counts = [count for count in range(1, samples + 1) if samples % (size * count) == 0]
        nearest = min(counts, key=lambda count: (abs(count - num_ranks), -count))
        raise CheckpointError(
            f"the run's updates have {samples} volumes, which {num_ranks} ranks with batch_size {size} cannot share "
            f"equally; the nearest number of ranks that can is {nearest}; start that many, or choose another name for "
            "a new run"
        )
    return samples // (size * num_ranks)


def _any_checkpoint(name: str, stage: str) -> dict[str, Any]:
    """Return a checkpoint of the run without reading its tensors; empty without one. All have equally large updates."""
    for path in RunFolder(RUNS / name).checkpoints.glob(f"{stage}_step_*.pt"):
        try:
            check_regular(path)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (*READ_ERRORS, *AMBIGUOUS_READ_ERRORS):
            continue  # resuming says what is wrong with it
        if isinstance(state, dict):
            return state
    return {}
