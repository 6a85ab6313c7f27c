"""Saving and resuming a run: the content of a checkpoint, and which settings may change when it is resumed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data import DataSplit
from runtime.files import RUNS, RunFolder, check_regular
from runtime.processes import Process
from settings import CheckpointError, Settings, known_keys, look_up, restored, stored
from settings.errors import AMBIGUOUS_READ_ERRORS, READ_ERRORS
from training.checkpoints import Checkpoints
from training.step import TrainingStep

log = logging.getLogger(__name__)

_PARTS = ("settings", "samples_per_update", "volumes", "networks", "optimizers")


class ResumableRun:
    """A stage that trains in a run folder on some volumes; `first_step` is the number of steps finished before.

    `configured` are the settings of the user where the step's follow the number of ranks.
    """

    def __init__(
        self, step: TrainingStep, folder: RunFolder, volumes: DataSplit, configured: Settings | None = None
    ) -> None:
        self.step, self.folder, self.volumes = step, folder, volumes
        self.settings = configured or step.settings
        self.checkpoints = Checkpoints(folder.checkpoints, step.stage, step.training.keep_checkpoints)
        self.first_step = 0

    def resume(self) -> int:
        """Load the newest undamaged checkpoint and return the number of finished steps; 0 without one.

        Raise `CheckpointError` on all ranks if the settings, the volumes or the number of volumes per update changed
        in a way that changes the result.
        """
        process = self.step.process
        with process.raise_on_all_ranks():
            newest = self.checkpoints.newest() if process.is_rank_zero else None
        path = process.broadcast(newest)
        if path is not None:
            with process.raise_on_all_ranks():
                state = self.checkpoints.read(path)
                self._load(state, path)
            self.first_step = state["step"]
            log.info("resuming %s after step %d from %s", self.step.stage, self.first_step, path)
        return self.first_step

    def save(self, done: int) -> None:
        """Write a complete checkpoint from rank zero; call the step's `guard.raise_if_bad` first."""
        step = self.step
        with step.process.raise_on_all_ranks():
            if step.process.is_rank_zero:
                extra = {
                    "settings": stored(self.settings),
                    "samples_per_update": step.samples_per_update,
                    "volumes": _identity(self.volumes),
                    "metadata": step.metadata,
                }
                self.checkpoints.save(done, step.state_dict() | extra)

    def _load(self, state: dict[str, Any], path: Path) -> None:
        for name in _PARTS:
            if name not in state:
                raise _other_version(path, f"{name} is missing")
        before, samples_before = restored(state["settings"], path), state["samples_per_update"]
        check_resumable(self.step.stage, before, self.settings, samples_before, self.step.samples_per_update)
        try:
            _check_volumes(state["volumes"], _identity(self.volumes))
            self.step.load_state_dict(state)
        except torch.OutOfMemoryError:
            raise
        except (KeyError, ValueError, RuntimeError) as error:
            # torch raises these for missing or unexpected parameters and for wrong shapes.
            first_line = str(error).splitlines()[0] if str(error) else ""
            raise _other_version(path, f"{type(error).__name__}: {first_line}") from error


def _other_version(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not a checkpoint of this version of the program ({reason}); finish the run with the version that "
        "started it, or choose another name"
    )


def _identity(volumes: DataSplit) -> dict[str, Any]:
    return {
        "train": len(volumes.train),
        "val": len(volumes.val),
        "fingerprint": volumes.fingerprint,
        "digests": volumes.digests,
    }


def _check_volumes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise `CheckpointError` unless the volumes have the same names, classes, split and content as before."""
    if before["fingerprint"] != now["fingerprint"]:
        raise CheckpointError(
            "the run's checkpoint was made with other volumes, and resuming would mix two experiments: names, classes "
            f"or the split changed ({before['train']} for training and {before['val']} for validation -> "
            f"{now['train']} and {now['val']}); put them back to resume, or choose another name for a new run"
        )
    changed = [name for name, digest in now["digests"].items() if before["digests"][name] != digest]
    if changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise CheckpointError(
            "the run's checkpoint was made with other volumes, and resuming would mix two experiments: the content of "
            f"{', '.join(changed[:5])}{more} changed; put the files back to resume, or choose another name for a new "
            "run"
        )


class Change(NamedTuple):
    """A setting that differs from the checkpoint's, and whether that changes the result."""

    key: str
    before: Any
    now: Any
    changes_result: bool

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.before)} -> {json.dumps(self.now)}"


def check_resumable(stage: str, before: Settings, settings: Settings, samples_before: int, samples: int) -> None:
    """Raise `CheckpointError` with a list of all changes since the checkpoint that would change the result.

    `samples_before` and `samples` are the numbers of volumes per update over all processes. Memory knobs and logging
    may change, and so may the number of steps unless the learning rate depends on it. Each such change is logged.
    """
    training = settings.training_of(stage)
    reason = f"learning_rate_decay {training.learning_rate_decay} ends there"
    if training.learning_rate_decay == "none":
        reason = "warmup_steps auto depends on it" if training.warmup_steps == "auto" else ""
    ends = [f"{stage}.training.{name}" for name in ("max_steps", "max_hours")]
    refused, allowed = [], []
    for change in changed_settings(stage, before, settings):
        if change.changes_result:
            refused.append(str(change))
        elif reason and change.key in ends:
            refused.append(f"{change} ({reason})")
        else:
            allowed.append(change)
    if samples_before != samples:
        refused.append(
            f"volumes per update (batch_size x gradient_accumulation_steps x processes): {samples_before} -> {samples}"
        )
    if refused:
        raise CheckpointError(
            "the run's checkpoint was made with other settings, and resuming would mix two experiments:\n  "
            + "\n  ".join(refused)
            + "\nset these back to resume, or choose another name for a new run"
        )
    for change in allowed:
        log.info("resuming with a changed setting that does not affect the result: %s", change)


def changed_settings(stage: str, before: Settings, settings: Settings) -> list[Change]:
    """Return the settings of a stage that differ; those of the other stage do not matter to it."""
    changes = []
    old_values, new_values = before.model_dump(mode="json"), settings.model_dump(mode="json")
    for dotted, field in known_keys():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and dotted.split(".")[0] in ("seed", "data", stage, "device"):
            old, new = look_up(old_values, dotted), look_up(new_values, dotted)
            if old != new:
                changes.append(Change(dotted, old, new, extra["promise"] == "different mathematics"))
    return changes


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
