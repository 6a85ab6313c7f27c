"""A real CPU step in a process of its own: prints by how much the resident memory grew, and what was predicted."""

import gc
import json
import sys

import psutil
import torch

from memory.predict.prediction import Stage
from memory.predict.step import build_step, fullest_step, predict_step
from memory.watch.readings import reset_resident_peak, resident_peak_bytes
from settings import Settings


def main(overrides: dict, stage: Stage) -> None:
    torch.set_num_threads(1)
    settings = Settings().with_overrides({"device.type": "cpu", "device.mixed_precision": False, **overrides})
    small = settings.with_overrides({"data.voxel_size": (16, 16, 16), "autoencoder.training.slab_rows": 0})
    run(small, stage)  # libraries load their code and their threads at the first step
    gc.collect()
    before = psutil.Process().memory_info().rss
    assert reset_resident_peak(), "this system cannot reset the peak of the resident memory"
    run(settings, stage)
    grown = resident_peak_bytes() - before
    predicted = predict_step(settings, stage)
    print(json.dumps({"grown": grown, "predicted": predicted.peak_allocated_bytes, "margin": predicted.margin}))


def run(settings: Settings, stage: Stage) -> None:
    step = build_step(settings, stage)
    training = settings.autoencoder.training if stage == "autoencoder" else settings.ldm.training
    step([step.example_batch(training.batch_size)], fullest_step(settings, stage))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), "ldm" if sys.argv[2] == "ldm" else "autoencoder")
