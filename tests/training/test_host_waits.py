"""The host never waits for the device inside a step: no value is read, and only the batch is copied from the host.

Tensors on torch's meta device have shapes and no values, so whatever reads one raises an error. Copies between the host
and the device are recorded by a dispatch mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.files import RunFolder
from runtime.processes import Process
from settings import Settings
from tests.conftest import ROOT
from training.autoencoder_step import AutoencoderStep
from training.ldm_step import LatentDiffusionStep
from training.recording import Recorder, RunClock
from training.step import TrainingStep

DEVICE = torch.device("meta")


class WaitRecord(TorchDispatchMode):
    """Records copies to the host, and copies from it of anything but the batch."""

    def __init__(self, pinned: Sequence[Tensor]) -> None:
        super().__init__()
        self.pinned = {tensor.untyped_storage().data_ptr() for tensor in pinned}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        tensors = [value for value in _flat((args, kwargs or {})) if isinstance(value, Tensor)]
        result = func(*args, **(kwargs or {}))
        written = next(_flat(args[:1] if name.endswith("_") else result), None)
        if isinstance(written, Tensor):
            self._look_for_copies(name, tensors, written)
        return result

    def _look_for_copies(self, name: str, read: Sequence[Tensor], written: Tensor) -> None:
        if written.device != DEVICE and any(tensor.device == DEVICE for tensor in read):
            self.found.append(f"{name} copies to the host in {_place()}")
        if written.device == DEVICE:
            for tensor in read:
                # A plain number that became a tensor of no axes goes to a kernel as its argument.
                is_copied = tensor.device != DEVICE and (tensor.dim() > 0 or "copy" in name)
                if is_copied and tensor.untyped_storage().data_ptr() not in self.pinned:
                    self.found.append(f"{name} copies from pageable memory in {_place()}")


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _place() -> str:
    """Return the innermost line of the project, outside its tests."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("tests", ".venv"):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "no line of the project"


class _NoGenerator:
    """Stands for a generator on the device, which torch does not offer for tensors without values."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def manual_seed(self, seed: int) -> None:
        """Seed nothing."""


@contextmanager
def without_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let steps be built and run on `DEVICE`; new tensors of networks are made there."""
    autocast, enabled = torch.autocast, torch.is_autocast_enabled
    normal, uniform = Tensor.normal_, Tensor.uniform_

    def no_autocast(kind: str, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        return nullcontext() if kind == DEVICE.type else autocast(kind, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", no_autocast)
        patch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": kind != DEVICE.type and enabled(kind))
        patch.setattr("runtime.randomness.torch.Generator", _NoGenerator)
        patch.setattr(Tensor, "normal_", lambda self, *args, generator=None: normal(self, *args))
        patch.setattr(Tensor, "uniform_", lambda self, *args, generator=None: uniform(self, *args))
        patch.setattr(sys.modules[torch.optim.Adam.__module__], "_device_dtype_check_for_fused", lambda parameter: None)
        yield


def build(settings: Settings, stage: str) -> TrainingStep:
    """Build the step of a stage on `DEVICE`."""
    kind = AutoencoderStep if stage == "autoencoder" else LatentDiffusionStep
    with DEVICE:
        return kind(settings, Process(DEVICE), load_weights=False)


def waits(step: Any, number: int, also: Callable[[dict[str, Tensor]], None] = lambda terms: None) -> list[str]:
    """Run two steps from `number` on and return what would make the host wait in the second.

    `also` gets the terms of each. The first step makes what later ones reuse: optimizer states, the guard's numbers.
    """
    batches = [step.example_batch(step.training.batch_size) for _ in range(2)]
    also(step(batches, number))
    tensors = [value for batch in batches for value in vars(batch).values() if isinstance(value, Tensor)]
    tensors += [part for batch in batches if hasattr(batch, "condition") for part in batch.condition.parts.values()]
    with WaitRecord(tensors) as record:
        also(step(batches, number + 1))
    return record.found


FP16 = {"device": {"mixed_precision": True, "amp_dtype": "float16"}}
ADVERSARIAL_START = 4
AVERAGED = {"ema_decay": 0.99, "max_grad_norm": 0.0, "warmup_steps": 2, "learning_rate_decay": "cosine"}
PERCEPTUAL = {"use_perceptual_loss": True, "perceptual": {"network": "structural"}}
CLASSES = {"conditioning": {"type": "class", "num_classes": 3}}
VOLUMES = {"latents": {"cache": "none"}, "scheduler": {"type": "rflow"}, "sampling": {"sampler": "rflow"}}

# What is found names its line, so one case may have several options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 1": ("autoencoder", {}),
    "stage 1, fp16, averaged": ("autoencoder", FP16 | AVERAGED),
    "stage 1, checkpointed, codebook": ("autoencoder", {"use_gradient_checkpointing": True, "bottleneck": "vq"}),
    "stage 1, slabs": ("autoencoder", {"use_gradient_checkpointing": True, "slab_rows": 8, **PERCEPTUAL}),
    "stage 2": ("ldm", CLASSES),
    "stage 2, fp16, averaged": ("ldm", FP16 | AVERAGED | {"pixel_loss": {"weight": 0.5}}),
    "stage 2, volumes, checkpointed": ("ldm", VOLUMES | {"use_gradient_checkpointing": True}),
}


@pytest.fixture(autouse=True)
def _without_values(monkeypatch):
    with without_values(monkeypatch):
        yield


def step_of(values: dict[str, Any], stage: str, changes: dict[str, Any]) -> Any:
    section = values[stage]
    for key, change in changes.items():
        if key == "device":
            values["device"] = {"type": "cpu", **change}
        elif key == "bottleneck":
            section.update(bottleneck=change, codebook_size=16)
        elif key in ("conditioning", "scheduler", "sampling", "latents"):
            section.setdefault(key, {}).update(change)
        else:
            section["training"][key] = change
    values["autoencoder"]["training"]["adversarial_start_step"] = ADVERSARIAL_START
    return build(Settings.model_validate(values), stage)


@pytest.mark.parametrize(("stage", "changes"), CASES.values(), ids=CASES)
def test_a_step_never_waits(tiny_values, stage, changes):
    assert waits(step_of(tiny_values, stage, changes), ADVERSARIAL_START) == []


@pytest.mark.parametrize("changes", [{}, FP16])
def test_neither_a_step_without_the_discriminator_nor_the_recorder_waits(tiny_values, tmp_path, changes):
    step = step_of(tiny_values, "autoencoder", changes)
    assert not step.is_adversarial(1)
    with Recorder(RunFolder(tmp_path), "autoencoder", Process(DEVICE), RunClock(0, 8)) as recorder:
        assert waits(step, 0, lambda terms: recorder.add(terms, 1)) == []
