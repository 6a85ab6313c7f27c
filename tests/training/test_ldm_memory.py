"""The pixel loss at 256x256x64: the memory of the step that trains, tracked on fake tensors."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

# In a process of its own: the autocast rules that it installs must not leak.
PROGRAM = """
from memory.measure import emulated, tracked
from memory.predicted_step import build_step
from settings import load_settings
import torch

settings = load_settings("configs/high_res.yaml", [
    "data.voxel_size=[256, 256, 64]",
    "autoencoder.num_channels=[16, 32, 64]",
    "autoencoder.attention_levels=[false, false, true]",
    "autoencoder.norm_num_groups=8",
    "autoencoder.num_res_blocks=2",
    "autoencoder.training.use_gradient_checkpointing=true",
    "autoencoder.training.use_gradient_checkpointing_offload=false",
    "autoencoder.training.use_nested_checkpointing=auto",
    "autoencoder.training.checkpoint_levels=all",
    "autoencoder.training.slab_rows=0",
    "ldm.training.batch_size=2",
    "ldm.training.pixel_loss.weight=1.0",
])
with emulated() as mode:
    for name in ("lean", "plain", "slabs"):
        step = build_step(settings, "ldm")
        if name == "plain":
            step.autoencoder.gradient_checkpointing_disable()
            step.pixel_loss.chunk_size = 2
        if name == "slabs":
            step.autoencoder.set_slab_rows(8)
        batch = step.example_batch(2)
        with tracked(mode) as tracker:
            step.backward([batch], 0)
        print(name, tracker.peak["device"] / 2**30)
        del step
"""


def test_pixel_loss_in_checkpointed_chunks_needs_at_most_a_quarter_of_the_plain_computation():
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    peaks = {line.split()[0]: float(line.split()[1]) for line in result.stdout.splitlines()}
    assert peaks["lean"] <= peaks["plain"] / 4, peaks
    assert peaks["slabs"] < peaks["lean"], peaks
