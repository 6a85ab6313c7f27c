"""Where the time of a stage-2 step goes: all but a few per cent into forward, backward, optimizer and averaging."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import training.ldm_step
import training.step
from data import BatchPlan, VolumeFile
from diffusion.latent_batches import latent_batches
from diffusion.latent_files import LatentFacts, LatentFolder
from runtime.processes import Process
from settings import load_settings
from tests.conftest import ROOT
from training.ldm_step import LatentDiffusionStep

WORK = ("forward", "pixel loss", "backward", "optimizer")


def test_a_step_from_cached_latents_spends_under_5_per_cent_outside_its_work(tmp_path, monkeypatch):
    settings = load_settings(ROOT / "configs" / "quickstart.yaml", ["device.type=cpu"])
    step = LatentDiffusionStep(settings, Process(torch.device("cpu")), load_weights=False)
    folder, files = LatentFolder(tmp_path / "latents", settings.latent_shape), []
    for number in range(16):
        file = VolumeFile(tmp_path / f"{number}.nii", f"{number}.nii")
        file.path.write_bytes(b"")
        folder.write(file, torch.randn(settings.latent_shape), LatentFacts((1.0,) * 3, (0.0,), (1.0,)))
        files.append(file)

    # Of this thread alone: what other processes on the machine do does not count, nor does the reading thread.
    clock = time.thread_time
    spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = clock()
        yield
        spent[name] += clock() - start

    for module in (training.ldm_step, training.step):
        monkeypatch.setattr(module, "phase", timed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plan = BatchPlan(0, settings.ldm.training.batch_size, 1)
        start = 0.0
        steps = latent_batches(lambda index, _: folder.read(files[index]), len(files), plan, 0, 6)
        for number, batches in enumerate(steps):
            step(batches, number)
            if number == 1:  # the first steps also set things up
                spent.clear()
                start = clock()
        total = clock() - start
    finally:
        torch.set_num_threads(threads)
    outside = 1 - sum(spent[name] for name in WORK) / total
    assert all(spent[name] > 0 for name in ("forward", "backward", "optimizer"))
    assert outside < 0.05, f"{outside:.1%} of {total:.2f} s: {dict(spent)}"
