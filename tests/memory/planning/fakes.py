"""Fingerprints made up for tests, and a predictor that answers from a formula."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from data.discovery import DiscoveredVolume
from memory.kernels.gpus import check_gpu
from memory.planning.fingerprint import CT, Fingerprint, Spread
from memory.planning.planner import Plan, Planner
from memory.predict.prediction import GIB, MARGINS, VALIDATED_VOLUME, Prediction, Predictor, Stage, tier_of
from settings import Settings

MR = "MR or another positive modality"


class FakePredictor(Predictor):
    """Memory in proportion to voxels, channels and batch, as real steps have it; counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Settings, Stage]] = []

    def submit(self, settings: Settings, stage: Stage) -> Future[Prediction]:
        self.asked.append((settings, stage))
        first = stage == "autoencoder"
        training = settings.autoencoder.training if first else settings.ldm.training
        channels = (settings.autoencoder if first else settings.ldm.unet).num_channels[0]
        voxels = math.prod(settings.training_grid if first else settings.latent_shape[1:]) * training.batch_size
        bytes_each = (15 if training.checkpoints_blocks else 45) * (2 if settings.device.mixed_precision else 4)
        peak = round(1e8 + voxels * channels * bytes_each)
        # Whole volumes are decoded in slabs, beside which their first and last tensors are whole.
        whole = 1e8 + 3 * math.prod(settings.data.voxel_size) * settings.autoencoder.num_channels[0] * 2
        tier = tier_of(settings, stage)
        moved = 10 * peak * training.gradient_accumulation_steps
        work = [{"kind": "norm", "level": 0, "is_half": True, "nbytes": moved, "flops": 0, "kernels": 1}]
        future: Future[Prediction] = Future()
        future.set_result(
            Prediction(
                stage=stage,
                tier=tier,
                peak_allocated_bytes=peak,
                peak_reserved_bytes=peak,
                margin=MARGINS[tier],
                work=work,
                run_peaks={"validation": {"allocated_bytes": round(whole), "reserved_bytes": round(whole)}},
                max_steps=training.max_steps,
                num_validations=math.ceil(training.max_steps / training.validate_every),
                beside={VALIDATED_VOLUME: work},
            )
        )
        return future


def fake_set(
    number: int,
    size: Sequence[float],
    spacing: tuple[float, ...] = (1.0, 1.0, 1.0),
    kind: str = MR,
    variation: float = 1.0,
    background: float = 0.4,
    num_channels: int = 1,
    classes: dict[str, int] | None = None,
) -> Fingerprint:
    """Return the fingerprint of a set that does not exist."""
    rng = np.random.default_rng(0)
    sizes = [tuple(round(n * rng.uniform(1 / variation, variation)) for n in size) for _ in range(number)]
    lowest, high = (-1024.0, 400.0) if kind == CT else (0.0, 900.0)
    return Fingerprint(
        source="/data/fake",
        volumes=tuple(_files(number, classes or {})),
        sizes=tuple(sizes),
        spacings=(spacing,) * number,
        num_without_spacing=0,
        num_channels=num_channels,
        kinds={kind: number},
        lowest=Spread(lowest, lowest, lowest),
        low=Spread(lowest, lowest, lowest),
        median=Spread(0, 0, 0),
        high=Spread(high, high, high),
        largest=2 * high,
        background=background,
        num_flat=0,
        classes=classes or {},
    )


def _files(number: int, classes: dict[str, int]) -> Iterator[DiscoveredVolume]:
    """Yield the volumes, each in the folder of its class."""
    folders = [f"{name}/" for name, count in classes.items() for _ in range(count)] or [""] * number
    for n, folder in enumerate(folders):
        yield DiscoveredVolume(
            Path(f"/data/fake/{folder}{n}.nii"), f"{folder}{n}.nii", folder.removesuffix("/") or None
        )


SETS = {
    "CT": fake_set(120, (512, 512, 120), (0.8, 0.8, 2.5), CT, variation=1.2),
    "MR": fake_set(200, (176, 240, 256)),
    "thick slices": fake_set(80, (320, 320, 24), (0.8, 0.8, 5.0)),
    "small crops": fake_set(200, (35, 50, 36), variation=1.2, background=0.03),
    "two channels": fake_set(60, (128, 128, 96), (1.5, 1.5, 2.0), num_channels=2),
}


def planned(
    fingerprint: Fingerprint,
    budget_gb: float = 24,
    hours: float | None = None,
    predictor: FakePredictor | None = None,
    **given: object,
) -> Plan:
    """Return the plan for a fingerprint; `given` are overrides with __ for the dots."""
    overrides = {key.replace("__", "."): value for key, value in given.items()}
    budget, gpu = round(budget_gb * GIB), check_gpu("RTX 4090")
    return Planner(fingerprint, overrides, "fake", predictor or FakePredictor(), budget, gpu).plan(hours)
