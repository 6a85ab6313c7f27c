"""What a run saves: complete checkpoints that survive a crash, what may change before it resumes, and its weights.

A checkpoint is written to a temporary file, then renamed to a name with its hash.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import math
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from data import DataSplit
from models.frozen_autoencoder import check_pretrained
from models.weight_files import load_into, load_texts, load_weights, save_weights
from runtime.files import RUNS, RunFolder, check_regular, put_in_place, reason, temporary_beside
from runtime.processes import Process
from settings import AutoencoderSettings, CheckpointError, Settings, TrainingError, look_up
from settings.errors import AMBIGUOUS_READ_ERRORS, READ_ERRORS
from settings.load import known_keys, restored, stored
from training.step import TrainingStep

log = logging.getLogger(__name__)

_PARTS = ("settings", "samples_per_update", "volumes", "networks", "optimizers")


class _HashingFile(io.BufferedWriter):
    """A file that hashes what is written to it, so that the checksum needs no second read."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.hash = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Hash and write; keep the error of a failed write, because torch's writer hides it."""
        self.hash.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


class Checkpoints:
    """The checkpoints of one stage in one folder."""

    def __init__(self, folder: Path, stage: str, keep: int) -> None:
        self.folder = folder
        self.stage = stage
        self.keep = keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove the oldest beyond `keep`; an interrupted save leaves the others alone."""
        stem = f"{self.stage}_step_{step:08d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary_beside(self.folder / stem) as temporary:
                digest = _write(temporary, {**state, "stage": self.stage, "step": step})
                path = self.folder / f"{stem}_{digest[:16]}.pt"
                put_in_place(temporary, path)
        except OSError as error:
            raise TrainingError(
                f"{self.folder}: the checkpoint of step {step} could not be written ({reason(error)}); "
                "earlier checkpoints are untouched; make room or choose another name, then run the same command again"
            ) from error
        # The oldest beyond `keep`, and temporary files of interrupted saves.
        for old in [p for p in self._newest_first() if p != path][self.keep - 1 :]:
            old.unlink(missing_ok=True)
        for temporary in self.folder.glob(f".{self.stage}_step_*.tmp"):
            temporary.unlink(missing_ok=True)
        return path

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, or None when there are no checkpoints.

        Damaged ones are logged and renamed to *.damaged. Raise `CheckpointError` if all are damaged.
        """
        damaged: list[Path] = []
        for path in self._newest_first():
            if _is_whole(path):
                for other in damaged:  # so that they do not count towards `keep`
                    other.rename(other.with_suffix(".damaged"))
                return path
            log.warning("%s: damaged, because its content does not match its checksum; trying the one before it", path)
            damaged.append(path)
        if damaged:
            raise CheckpointError(
                f"{self.folder}: every checkpoint of stage {self.stage} is damaged "
                f"({', '.join(path.name for path in damaged)}); restore one from a backup, or delete them all"
            )
        return None

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint by its name, damaged or not; 0 without one."""
        return max((_step_and_digest(path)[0] for path in self._newest_first()), default=0)

    def read(self, path: Path) -> dict[str, Any]:
        """Return a checkpoint's state on the CPU; never execute code from the file."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (*READ_ERRORS, *AMBIGUOUS_READ_ERRORS) as error:
            if isinstance(error, AMBIGUOUS_READ_ERRORS) and _is_whole(path):
                raise  # the file is undamaged, so this is a bug
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"{path}: cannot be read ({first_line}); when several machines train together, put the run folder on a "
                "shared disk"
            ) from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: contains a {type(state).__name__}, not a checkpoint; move it away")
        return state

    def _newest_first(self) -> list[Path]:
        # Not with glob, for which a folder that cannot be read is empty: the run would start again.
        pattern = f"{self.stage}_step_{'[0-9]' * 8}_{'[0-9a-f]' * 16}.pt"
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        paths = [path for path in files if fnmatchcase(path.name, pattern)]
        return sorted(paths, key=lambda path: (_step_and_digest(path)[0], path.lstat().st_mtime_ns), reverse=True)


def _step_and_digest(path: Path) -> tuple[int, str]:
    *_, step, digest = path.stem.split("_")
    return int(step), digest


def _write(path: Path, state: dict[str, Any]) -> str:
    """Write a checkpoint file and return the SHA-256 of its content."""
    with _HashingFile(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's writer reports a full disk as an internal error of its own.
            raise file.failure or error from None
        return file.hash.hexdigest()


def _is_whole(path: Path) -> bool:
    """Return whether the content matches the hash in the name; raise `CheckpointError` if it cannot be read."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest().startswith(_step_and_digest(path)[1])
    except OSError as error:
        if error.errno == errno.EIO:  # a bad sector: the file is damaged
            return False
        raise CheckpointError(f"{path}: cannot be read ({reason(error)}); make it readable, or move it away") from error


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
        step, problem = self.step, next((f"{name} is missing" for name in _PARTS if name not in state), "")
        if not problem:
            before = restored(state["settings"], path)
            check_resumable(step.stage, before, self.settings, state["samples_per_update"], step.samples_per_update)
            try:
                _check_volumes(state["volumes"], _identity(self.volumes))
                self.step.load_state_dict(state)
                return
            except torch.OutOfMemoryError:
                raise
            except (KeyError, ValueError, RuntimeError) as error:
                # torch raises these for missing or unexpected parameters and for wrong shapes.
                problem = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise CheckpointError(
            f"{path}: not a checkpoint of this version of the program ({problem}); finish the run with the version "
            "that started it, or choose another name"
        )


def _identity(volumes: DataSplit) -> dict[str, Any]:
    counts = {"train": len(volumes.train), "val": len(volumes.val)}
    return {**counts, "fingerprint": volumes.fingerprint, "digests": volumes.digests}


def _check_volumes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise `CheckpointError` unless the volumes have the same names, classes, split and content as before."""
    what = ""
    if before["fingerprint"] != now["fingerprint"]:
        counts = [f"{volumes['train']} for training and {volumes['val']} for validation" for volumes in (before, now)]
        what = f"names, classes or the split changed ({' -> '.join(counts)})"
    elif changed := [name for name, digest in now["digests"].items() if before["digests"][name] != digest]:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        what = f"the content of {', '.join(changed[:5])}{more} changed"
    if what:
        raise CheckpointError(
            "the run's checkpoint was made with other volumes, and resuming would mix two experiments: "
            f"{what}; put the files back to resume, or choose another name for a new run"
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
    key, configured = f"{stage}.training.gradient_accumulation_steps", settings.training_of(stage)
    change = f"{key}: {configured.gradient_accumulation_steps} -> {steps}"
    log.info("%s, so that an update on %d ranks has as many volumes as before", change, process.world_size)
    return settings.with_overrides({key: steps})


def _accumulation(settings: Settings, stage: str, num_ranks: int) -> int | None:
    """Return the accumulation that the checkpoint asks for; None: the configured one, or there is no checkpoint."""
    training, state = settings.training_of(stage), None
    # Any checkpoint, without its tensors: all have equally large updates.
    for path in RunFolder(RUNS / settings.name).checkpoints.glob(f"{stage}_step_*.pt"):
        with suppress(*READ_ERRORS, *AMBIGUOUS_READ_ERRORS):  # resuming says what is wrong with it
            check_regular(path)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            break
    if not isinstance(state, dict) or not {"settings", "samples_per_update"} <= state.keys():
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
    if step.process.is_rank_zero:
        path = run.weights(step.stage)
        # The last step was saved before. A run that goes on later has checkpoints of further steps.
        _write_weights(step, path, {"step": Checkpoints(run.checkpoints, step.stage, keep=2).newest_step()})
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
            _write_weights(self.step, self.path, {"step": done, self.name: value})


def _write_weights(step: TrainingStep, path: Path, facts: dict[str, Any]) -> None:
    own = {"stage": step.stage, "settings": stored(step.settings), **licence_of(step.stage, step.settings)}
    with step.inference_weights():
        save_weights(path, step.network.state_dict(), own | step.metadata | facts)


def licence_of(stage: str, settings: Settings) -> dict[str, str]:
    """Return the licence of the weights that a run was fine-tuned from, if they name one."""
    section = settings.autoencoder if stage == "autoencoder" else settings.ldm
    if section.pretrained is None or not Path(section.pretrained).is_file():
        return {}
    licence = load_texts(Path(section.pretrained)).get("licence")
    return {} if licence is None else {"licence": licence}
