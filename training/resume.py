"""Going on where a run stopped: what a checkpoint holds, and which settings may have changed since."""

from __future__ import annotations

import json
import logging
from typing import Any

from settings import CheckpointError, Settings, known_keys
from training.checkpoints import Checkpoints
from training.step import TrainingStep

log = logging.getLogger(__name__)

_STAGE_SECTIONS = {
    "autoencoder": ("seed", "data", "autoencoder", "device"),
    "ldm": ("seed", "data", "ldm", "device"),
}


def resume(step: TrainingStep, checkpoints: Checkpoints, settings: Settings, samples: int) -> int:
    """Load the newest whole checkpoint into the step and return how many steps are done; 0 without one.

    `samples` is the number of volumes per update over all processes. Raises `CheckpointError` when the settings
    changed in a way that would mix two experiments.
    """
    path = step.process.from_first(checkpoints.newest() if step.process.is_first else None)
    if path is None:
        return 0
    state = checkpoints.read(path)
    check_resumable(step.stage, state["settings"], settings, state["samples_per_update"], samples)
    step.load_state_dict(state)
    log.info("resuming %s after step %d from %s", step.stage, state["step"], path)
    return state["step"]


def save(step: TrainingStep, checkpoints: Checkpoints, settings: Settings, samples: int, done: int) -> None:
    """Write a complete checkpoint from the first process; raise instead if the step met something not finite."""
    step.guard.raise_if_bad()
    if step.process.is_first:
        extra = {"settings": settings.model_dump(mode="json"), "samples_per_update": samples}
        checkpoints.save(done, step.state_dict() | extra)
    step.process.barrier()


def check_resumable(stage: str, before: dict[str, Any], settings: Settings, samples_before: int, samples: int) -> None:
    """Compare a checkpoint's settings with these; raise `CheckpointError` listing what would change the result.

    `samples_before` and `samples` are the volumes per update, over all processes. Memory knobs, step counts and
    logging may change, and each such change is logged.
    """
    changed, allowed = changed_settings(stage, before, settings)
    if samples_before != samples:
        changed.append(
            f"volumes per update (batch_size x gradient_accumulation_steps x processes): {samples_before} -> {samples}"
        )
    if changed:
        raise CheckpointError(
            "the run's checkpoint was made with other settings, and going on would mix two experiments:\n  "
            + "\n  ".join(changed)
            + "\nset these back to resume, or choose another name for a new run"
        )
    for line in allowed:
        log.info("resuming with a changed setting that does not change the result: %s", line)


def changed_settings(stage: str, before: dict[str, Any], settings: Settings) -> tuple[list[str], list[str]]:
    """Return a line for each setting of a stage that changed: those that change the result, and those that do not."""
    changed: list[str] = []
    allowed: list[str] = []
    after = settings.model_dump(mode="json")
    for dotted, field in known_keys():
        extra = field.json_schema_extra
        if not isinstance(extra, dict) or dotted.split(".")[0] not in _STAGE_SECTIONS[stage]:
            continue
        old, new = _look_up(before, dotted), _look_up(after, dotted)
        if old == new:
            continue
        line = f"{dotted}: {json.dumps(old)} -> {json.dumps(new)}"
        (changed if extra["promise"] == "different mathematics" else allowed).append(line)
    return changed, allowed


def _look_up(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
