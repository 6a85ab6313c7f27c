"""512x512x512 through MAISI's autoencoder, as it is predicted for a GPU: on 8 GiB, with little extra work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memory.predict.emulation import emulated, tracked
from memory.predict.tracker import MemoryTracker
from models.volume_codec import VolumeCodec, frozen_codec
from runtime.processes import Process
from settings import Settings, load_settings

GIB = 1 << 30
CUBE = ("data.voxel_size=[512,512,512]", "data.patch_size=[128,128,128]", "autoencoder.training.slab_rows=0")


@pytest.fixture(scope="module")
def settings() -> Settings:
    return load_settings("configs/maisi.yaml", [*CUBE, "device.type=cpu", "device.amp_dtype=bfloat16"])


def track(settings: Settings, budget: int, run: Callable[[VolumeCodec], object]) -> MemoryTracker:
    with emulated(cuda=True) as mode, tracked(mode, True) as tracker, torch.no_grad():
        codec = frozen_codec(settings, Process(torch.device("cpu")), load_weights=False, budget_bytes=budget)
        run(codec)
    return tracker


def flops_and_bytes(tracker: MemoryTracker) -> tuple[int, int]:
    work = tracker.work.values()
    return sum(part.flops for part in work), sum(part.nbytes for part in work)


def test_decoding_takes_an_8_gib_card_and_little_more_work_than_one_that_holds_everything(settings):
    def decode(codec: VolumeCodec) -> None:
        codec.decode(torch.zeros(settings.latent_shape))

    streamed, whole = track(settings, 0, decode), track(settings, 1 << 50, decode)
    assert whole.peak["device"] > 90 * GIB
    assert streamed.peak["device"] < 6.5 * GIB
    assert streamed.peak["host"] == 52 * GIB, "the upsampled volume, what comes of it, and the level below"
    for mine, theirs in zip(flops_and_bytes(streamed), flops_and_bytes(whole), strict=True):
        assert mine < 1.5 * theirs


def test_encoding_takes_an_8_gib_card(settings):
    def encode(codec: VolumeCodec) -> None:
        codec.encode(torch.zeros(1, 512, 512, 512))

    streamed = track(settings, 0, encode)
    assert streamed.peak["device"] < 6.5 * GIB
    assert streamed.peak["host"] == 32 * GIB
