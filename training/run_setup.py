"""Opening a run: lock its folder, remove leftovers, and record its config and environment."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from data import DataSplit
from runtime import cublas
from runtime.files.atomic import write_text
from runtime.files.names import printable
from runtime.files.reading import check_regular, reason
from runtime.files.run_folder import RUNS, RunFolder, used_caches
from runtime.processes import Process, device_name
from settings import Settings, UserError, dump_yaml
from training.recording.trackers import check_trackers

log = logging.getLogger(__name__)

_PACKAGES = ("torch", "monai", "numpy", "nibabel", "pydantic", "safetensors")


@contextmanager
def open_run(settings: Settings, process: Process) -> Iterator[RunFolder]:
    """Create the run folder and hold its lock, in the first process; yield its paths in every process."""
    folder = RunFolder(RUNS / settings.name)
    with ExitStack() as stack:
        with process.raise_on_all_ranks():
            if process.is_rank_zero:
                stack.enter_context(locked(folder))
                _remove_leftovers(folder)
                _check_metrics(folder.metrics)
        yield folder


def check_run(settings: Settings, is_dry_run: bool) -> None:
    """Raise `UserError` if the run could not be opened for a reason that is known before anything slow begins.

    That is a tracker that is missing, or another process that holds the lock, which does not matter to a dry run. Only
    rank zero tries the lock: ranks that try it at the same time would meet each other.
    """
    check_trackers(settings.logging)
    folder = RunFolder(RUNS / settings.name)
    if not is_dry_run and os.environ.get("RANK", "0") == "0" and (folder.path / ".lock").exists():
        with locked(folder):
            pass


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Create the run folder and hold its lock; raise `UserError` if another process holds it."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = (folder.path / ".lock").open("a+")
        check_regular(folder.path / ".lock")
    except OSError as error:
        raise UserError(
            f"{folder.path}: cannot be written ({reason(error)}); make it writable, or start in a folder where it is"
        ) from error
    try:
        # The system releases this lock however the process ends. With flock, the data loader's workers would inherit
        # it and keep it for a few seconds after the main process is killed.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise UserError(
            f"{folder.path}: in use by another process ({lock.read().strip() or 'unknown'}); "
            "wait for it, stop it, or choose another name"
        ) from None
    except OSError as error:
        log.warning("%s: this disk has no file locks (%s); do not start a run twice", folder.path, error.strerror)
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {platform.node()}")
    lock.flush()
    with lock:
        yield


def _remove_leftovers(folder: RunFolder) -> None:
    """Remove temporary files of a killed process; `Checkpoints.save` removes those of checkpoints."""
    for path in (*folder.path.glob(".*.tmp"), *folder.previews.rglob(".*.png.*.tmp")):
        path.unlink(missing_ok=True)


def _check_metrics(path: Path) -> None:
    """Raise `UserError` if metrics.jsonl is not a regular file: reading a device might never end."""
    try:
        check_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be used ({reason(error)}); move it away") from None


def describe_run(folder: RunFolder, settings: Settings, process: Process, volumes: DataSplit | None = None) -> None:
    """Write the resolved config, the environment and the size of the data to the run folder, from the first process."""
    if not process.is_rank_zero:
        return
    write_text(folder.config, dump_yaml(settings))
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "device": device_name(process.device),
        "world_size": process.world_size,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cublas_workspace": cublas.workspace_config(),
    }
    if volumes is not None:
        counts = {"training": len(volumes.train), "held_out": len(volumes.val)}
        environment["data"] = {**counts, "classes": [printable(name) for name in volumes.class_names]}
    write_text(folder.environment, json.dumps(environment, indent=2) + "\n")
    caches = {f"{path.parent.name}/{path.name}" for path in used_caches if path.is_dir()} | (
        folder.known_caches() or set()
    )
    write_text(folder.caches, "".join(f"{name}\n" for name in sorted(caches)))
