"""The pixel loss at 256x256x64: the memory of the step that trains, tracked on fake tensors."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

# In a process of its own: the autocast rules that it installs must not leak. The plain computation is the stock decoder
# on the whole batch with all its activations kept.
PROGRAM = """
from memory.predict.emulation import emulated, tracked
from memory.predict.step import build_step
from settings import load_settings

common = [
    "ldm.training.batch_size=2",
    "ldm.training.pixel_loss.weight=1.0",
    "ldm.unet.num_channels=[32, 64]",
    "ldm.unet.num_res_blocks=1",
    "ldm.unet.attention_levels=[false, false]",
    "ldm.unet.norm_num_groups=8",
    "autoencoder.training.use_gradient_checkpointing_offload=false",
    "autoencoder.training.use_nested_checkpointing=auto",
    "autoencoder.training.slab_rows=0",
]
for name, implementation, chunk_size in (("lean", "lean", 1), ("plain", "monai", 2)):
    chosen = [f"autoencoder.implementation={implementation}", f"ldm.training.pixel_loss.chunk_size={chunk_size}"]
    settings = load_settings("configs/high_res.yaml", [*common, *chosen])
    with emulated() as mode:
        step = build_step(settings, "ldm")
        if name == "plain":
            step.autoencoder.gradient_checkpointing_disable()
        batch = step.example_batch(2)
        with tracked(mode) as tracker:
            step.backward([batch], 0)
        print(name, tracker.peak["device"] / 2**30)
        assert settings.data.voxel_size == (256, 256, 64)
"""


def test_pixel_loss_in_checkpointed_chunks_needs_at_most_a_quarter_of_the_plain_computation():
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    peaks = {line.split()[0]: float(line.split()[1]) for line in result.stdout.splitlines()}
    assert peaks["lean"] <= peaks["plain"] / 4, peaks
