"""What a training step will need, and the worker processes that compute it. Never imports torch.

A prediction replaces autocast rules for the whole process, so it never runs in a process that trains but always in a
worker (`answer_requests`). One worker answers many requests, because starting it takes seconds of imports.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from memory.kernels.gpus import Gpu, WorkPart, predicted_seconds
from settings import Settings, UserError

Stage = Literal["autoencoder", "ldm"]
MIB, GIB = 1 << 20, 1 << 30
CONTEXT_BYTES = GIB // 2
"""Assumed size of the CUDA context and its libraries, which the allocator does not count: 0.3 to 0.6 GiB by GPU and
driver."""

NOT_PREDICTED_ON_CPU = ("Python and its libraries", "the workers that load data, and volumes kept in memory")
NOT_PREDICTED = (
    "workspaces of channels-last convolutions",
    "the CUDA context (0.5 GiB is assumed)",
    "other programs on the GPU",
)
MARGINS = {"stock": 0.10, "plain": 0.10, "checkpointed": 0.20, "offload": 0.30, "slabs": 0.30}
"""By how much a real step may exceed its prediction, by tier: the leaner a step, the more it matters what kernels take
for themselves. Taken from real CPU steps; it shrinks with every full step measured on a machine."""
TRAINING_STEP = "training step"
VALIDATED_VOLUME, PREVIEWS, ENCODED_VOLUME = "validating a volume", "drawing the previews", "encoding a volume"
"""What a run does besides its updates: each held-out volume, the samples of a validation, each volume at the start."""
NCCL_BYTES = GIB // 4
"""Assumed for NCCL's own buffers, which no machine without GPUs can show."""


class PredictionError(RuntimeError):
    """A prediction worker failed; the text is its error message."""


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and compute of one training step, and what they consist of."""

    stage: str
    tier: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_reserved_default_bytes: int = 0
    peak_reserved_expandable_bytes: int = 0
    host_bytes: int = 0
    phase: str = ""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    breakdown: dict[str, int] = field(default_factory=dict)
    largest: list[dict[str, Any]] = field(default_factory=list)
    flops: dict[str, int] = field(default_factory=dict)
    margin: float = 0.0
    seconds: float = 0.0
    workspace_bytes: int = 0
    traffic_bytes: int = 0
    kernels: int = 0
    work: list[dict[str, Any]] = field(default_factory=list)
    run_peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    max_steps: int = 0
    beside: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    num_validations: int = 0
    num_volumes: list[int] = field(default_factory=lambda: [0, 0])
    bucket_bytes: int = 0
    config: str = ""
    time_correction: float = 1.0
    correction: float = 1.0
    correction_source: str = ""
    context_bytes: int = CONTEXT_BYTES
    not_predicted: Sequence[str] = field(default=NOT_PREDICTED)

    @property
    def is_for_gpu(self) -> bool:
        """Return whether the run is predicted on a GPU, which has a context, and not on a CPU."""
        return self.context_bytes > 0

    @property
    def needing_phase(self) -> str:
        """Return the part of the run that needs the most memory: the training step, or what runs beside it."""
        return max(self._reserved_by_phase.items(), key=lambda item: item[1])[0]

    @property
    def required_bytes(self) -> int:
        """Return the memory a device must have for the whole run: its largest reserved peak, and the context."""
        return max(self._reserved_by_phase.values()) + self.context_bytes

    @property
    def _reserved_by_phase(self) -> dict[str, int]:
        """The reserved peak of each part of the run; measurements correct the training step only."""
        others = {name: peak["reserved_bytes"] for name, peak in self.run_peaks.items()}
        return {TRAINING_STEP: round(self.peak_reserved_bytes * self.correction), **others}

    def needed_bytes(self, num_gpus: int) -> int:
        """Return the memory that each of `num_gpus` devices must have."""
        return self.required_bytes + (self.bucket_bytes + NCCL_BYTES if num_gpus > 1 else 0)

    @property
    def work_parts(self) -> list[WorkPart]:
        """Return the work of one update."""
        return [WorkPart(**part) for part in self.work]

    @property
    def is_time_measured(self) -> bool:
        """Return whether steps that were measured on the device correct the times."""
        return self.time_correction != 1.0

    def seconds_per_step(self, gpu: Gpu) -> float:
        """Return the time of an update on a GPU, as predicted or as measured steps make of it."""
        return predicted_seconds(self.work_parts, gpu) * self.time_correction

    def hours(self, gpu: Gpu) -> float:
        """Return the time of the whole run on a GPU: its updates, its validations, and encoding the latents."""
        return (self.seconds_per_step(gpu) * self.max_steps + sum(self.seconds_beside(gpu).values())) / 3600

    def seconds_beside(self, gpu: Gpu) -> dict[str, float]:
        """Return the times of what a run does besides its updates; of one volume if their number is unknown."""
        num_train, num_held_out = self.num_volumes
        times = {
            VALIDATED_VOLUME: self.num_validations * max(1, num_held_out),
            PREVIEWS: self.num_validations,
            ENCODED_VOLUME: max(1, num_train + num_held_out),
        }
        seconds = {n: predicted_seconds([WorkPart(**part) for part in done], gpu) for n, done in self.beside.items()}
        return {name: times[name] * each * self.time_correction for name, each in seconds.items()}

    @property
    def required_with_margin(self) -> int:
        """Return the memory a device must have if steps exceed their prediction by their whole margin."""
        return self.required_bytes + round(self.margin * self.peak_reserved_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        derived = {"required_bytes": self.required_bytes, "needing_phase": self.needing_phase}
        return {**asdict(self), "not_predicted": list(self.not_predicted), **derived}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Prediction:
        """Return the prediction that `to_json` wrote."""
        known = {known.name for known in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def tier_of(settings: Settings, stage: Stage) -> str:
    """Return the tier of a step: how lean it is. Predictions of one tier have similar errors."""
    training, autoencoder = settings.training_of(stage), settings.autoencoder.training
    if stage == "autoencoder" and (autoencoder.slab_rows or autoencoder.offload_levels):
        return "slabs"
    if training.use_gradient_checkpointing_offload:
        return "offload"
    if training.checkpoints_blocks:
        return "checkpointed"
    return "stock" if stage == "autoencoder" and settings.autoencoder.implementation == "monai" else "plain"


def fingerprint(settings: Settings, stage: Stage) -> str:
    """Return a short name of everything that decides what a step of this config needs."""
    values = settings.model_dump(mode="json", exclude={"name", "seed"})
    data = {name: values["data"][name] for name in ("voxel_size", "patch_size")}
    values["device"]["type"] = "cpu" if settings.device.type == "cpu" else "cuda"  # as auto is predicted
    parts = [stage, data, values["autoencoder"], values["ldm"] if stage == "ldm" else None, values["device"]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def fullest_step(settings: Settings, stage: Stage) -> int:
    """Return the number of a step in which every loss term is active."""
    if stage == "ldm":
        return 0
    training = settings.autoencoder.training
    return min(training.adversarial_start_step, training.last_step - 1)


class Predictor:
    """A pool of prediction workers; use it as a context manager.

    without_triton: the memory in bytes of a GPU that cannot run Triton, whose norms need copies; 0 for other devices.
    """

    def __init__(self, workers: int = 1, without_triton: int = 0) -> None:
        self._without_triton = without_triton
        self._threads = ThreadPoolExecutor(workers)
        self._folder = tempfile.TemporaryDirectory()
        self._stderr = Path(self._folder.name) / "stderr"  # keeps warnings out of the training's output
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self._processes = [self._start() for _ in range(workers)]
        for process in self._processes:
            self._idle.put(process)

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers; do nothing if they are stopped already."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def submit(self, settings: Settings, stage: Stage) -> Future[Prediction]:
        """Start a prediction and return immediately."""
        return self._threads.submit(self.predict, settings, stage)

    def predict(self, settings: Settings, stage: Stage) -> Prediction:
        """Return the prediction; raise `PredictionError` if the worker fails."""
        return Prediction.from_json(self._ask({"stage": stage, "settings": settings.model_dump(mode="json")}))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._idle.get()
        assert process.stdin is not None, "workers are started with pipes"
        assert process.stdout is not None, "workers are started with pipes"
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        self._idle.put(process)
        if not answer:
            printed = self._stderr.read_text().strip().splitlines() or ["it printed no error"]
            raise PredictionError(f"the prediction worker exited with code {process.wait()}; {printed[-1]}")
        values: dict[str, Any] = json.loads(answer)
        if "error" in values:
            raise PredictionError(values["error"])
        return values

    def _start(self) -> subprocess.Popen[str]:
        program = f"from memory.predict import prediction; prediction.answer_requests({self._without_triton})"
        # Predictions need no GPU, and workers must not compete for cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
        with self._stderr.open("a") as stderr:
            return subprocess.Popen(
                [sys.executable, "-c", program],
                cwd=Path(__file__).resolve().parents[2],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )


def answer_requests(without_triton: int) -> None:
    """Be a worker: read a JSON request per line from standard input and answer each with a line, until its end.

    Whatever networks print goes to stderr. without_triton: as in `Predictor`.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.disable(logging.WARNING)
    # Garbage collection during imports and tracking, with a million live objects, takes a tenth of the time. Collect
    # after each answer instead, when nobody waits. The predicted peak does not depend on when it runs.
    gc.disable()

    from memory.predict.step import predict_step

    answer: dict[str, Any]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            settings = Settings.model_validate(request["settings"])
            answer = predict_step(settings, request["stage"], without_triton=without_triton).to_json()
        except (UserError, RuntimeError, ValueError, AssertionError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        gc.collect()
