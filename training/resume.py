"""Saving and resuming a run: the content of a checkpoint, and which settings may change when it is resumed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from data import DataSplit
from settings import CheckpointError, Settings, known_keys, look_up, restored, stored
from training.checkpoints import Checkpoints
from training.step import TrainingStep

log = logging.getLogger(__name__)

_STAGE_SECTIONS = {
    "autoencoder": ("seed", "data", "autoencoder", "device"),
    "ldm": ("seed", "data", "ldm", "device"),
}


def resume(step: TrainingStep, checkpoints: Checkpoints, settings: Settings, volumes: DataSplit) -> int:
    """Load the newest undamaged checkpoint into the step and return the number of finished steps; 0 without one.

    Raise `CheckpointError` in every process if the settings, the volumes or the number of volumes per update changed
    in a way that changes the result.
    """
    with step.process.raise_on_all_ranks():
        newest = checkpoints.newest() if step.process.is_rank_zero else None
    path = step.process.broadcast(newest)
    if path is None:
        return 0
    with step.process.raise_on_all_ranks():
        state = checkpoints.read(path)
        _load(step, state, settings, volumes, path)
    log.info("resuming %s after step %d from %s", step.stage, state["step"], path)
    return state["step"]


def save(step: TrainingStep, checkpoints: Checkpoints, settings: Settings, volumes: DataSplit, done: int) -> None:
    """Write a complete checkpoint from the first process; call the step's `guard.raise_if_bad` first."""
    with step.process.raise_on_all_ranks():
        if step.process.is_rank_zero:
            extra = {
                "settings": stored(settings),
                "samples_per_update": step.samples_per_update,
                "volumes": _identity(volumes),
                "metadata": step.metadata,
            }
            checkpoints.save(done, step.state_dict() | extra)


def _load(step: TrainingStep, state: dict[str, Any], settings: Settings, volumes: DataSplit, path: Path) -> None:
    _check_content(state, path)
    samples, volumes_before = state["samples_per_update"], state["volumes"]
    before = restored(state["settings"], path)
    check_resumable(step.stage, before, settings, samples, step.samples_per_update)
    _check_volumes(volumes_before, volumes, path)
    try:
        step.load_state_dict(state)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, ValueError, RuntimeError) as error:
        # torch raises these for missing or unexpected parameters and for wrong shapes.
        raise _other_version(path, error) from error


def _check_content(state: dict[str, Any], path: Path) -> None:
    """Raise `CheckpointError` unless all parts are there, each of its kind."""
    sections = {name: state.get(name) for name in ("settings", "volumes", "networks", "optimizers")}
    parts = {
        **sections,
        **{f"networks.{name}": part for name, part in _items(sections["networks"])},
        **{f"optimizers.{name}": part for name, part in _items(sections["optimizers"])},
        **{"volumes.digests": dict(_items(sections["volumes"])).get("digests")},
        **({"average": state["average"]} if state.get("average") is not None else {}),
    }
    wrong = [name for name, part in parts.items() if not isinstance(part, dict)]
    wrong += [name for name in ("step", "samples_per_update") if type(state.get(name)) is not int or state[name] < 0]
    if wrong:
        raise _other_version(path, ValueError(f"{wrong[0]} is missing or damaged"))


def _items(section: Any) -> list[tuple[str, Any]]:
    return list(section.items()) if isinstance(section, dict) else []


def _other_version(path: Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
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


def _check_volumes(before: dict[str, Any], volumes: DataSplit, path: Path) -> None:
    """Raise `CheckpointError` unless the volumes have the same names, classes, split and content as before."""
    now = _identity(volumes)
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


def check_resumable(stage: str, before: Settings, settings: Settings, samples_before: int, samples: int) -> None:
    """Raise `CheckpointError` with a list of all changes since the checkpoint that would change the result.

    `samples_before` and `samples` are the numbers of volumes per update over all processes. Memory knobs and logging
    may change, and so may the number of steps unless the learning rate decays over them. Each such change is logged.
    """
    changed, allowed = changed_settings(stage, before, settings)
    training = getattr(settings, stage).training
    if training.learning_rate_decay != "none" or training.warmup_steps == "auto":
        # Then the learning rate depends on the number of steps.
        ends = [line for line in allowed if line.startswith(_ends(stage))]
        allowed = [line for line in allowed if line not in ends]
        why = f"learning_rate_decay {training.learning_rate_decay} ends there"
        if training.learning_rate_decay == "none":
            why = "warmup_steps auto depends on it"
        changed += [f"{line} ({why})" for line in ends]
    if samples_before != samples:
        changed.append(
            f"volumes per update (batch_size x gradient_accumulation_steps x processes): {samples_before} -> {samples}"
        )
    if changed:
        raise CheckpointError(
            "the run's checkpoint was made with other settings, and resuming would mix two experiments:\n  "
            + "\n  ".join(changed)
            + "\nset these back to resume, or choose another name for a new run"
        )
    for line in allowed:
        log.info("resuming with a changed setting that does not affect the result: %s", line)


def _ends(stage: str) -> tuple[str, ...]:
    return tuple(f"{stage}.training.{name}: " for name in ("max_steps", "max_hours"))


def changed_settings(stage: str, before: Settings, settings: Settings) -> tuple[list[str], list[str]]:
    """Return one line per changed setting of a stage: first those that change the result, then those that do not."""
    changed: list[str] = []
    allowed: list[str] = []
    old_values, new_values = before.model_dump(mode="json"), settings.model_dump(mode="json")
    for dotted, field in known_keys():
        extra = field.json_schema_extra
        if not isinstance(extra, dict) or dotted.split(".")[0] not in _STAGE_SECTIONS[stage]:
            continue
        old, new = look_up(old_values, dotted), look_up(new_values, dotted)
        if old == new:
            continue
        line = f"{dotted}: {json.dumps(old)} -> {json.dumps(new)}"
        (changed if extra["promise"] == "different mathematics" else allowed).append(line)
    return changed, allowed
