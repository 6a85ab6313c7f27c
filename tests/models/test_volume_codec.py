"""Whole volumes are encoded and decoded in the precision and in the slabs that were asked for."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from unittest import mock

import psutil
import pytest
import torch

from memory.predict.emulation import measure_peak
from memory.predict.tracker import MemoryTracker
from models import build_autoencoder, volume_codec
from models.lean.rows import DeviceSpace, HostMemoryError, HostSpace
from models.volume_codec import VolumeCodec, freed_at_once
from runtime.observer import MemoryObserver, observed_by
from runtime.precision import Precision
from settings import Settings
from tests.conftest import ROOT

CPU = torch.device("cpu")
GRID = (32, 16, 16)


@pytest.fixture
def codec_of(tiny_values, monkeypatch):
    """Build a codec from dotted changes and a budget; also return the list of slab sizes that it sets."""

    def build(budget_bytes: int | None = None, **changes) -> tuple[VolumeCodec, list[int]]:
        names = {name.replace("__", "."): value for name, value in changes.items()}
        settings = Settings.model_validate(tiny_values).with_overrides({"data.voxel_size": GRID, **names})
        torch.manual_seed(0)
        autoencoder = build_autoencoder(settings.autoencoder).eval()
        used: list[int] = []
        set_slab_rows = autoencoder.set_slab_rows

        def noted(rows: int, *others) -> None:
            used.append(rows)
            set_slab_rows(rows, *others)

        monkeypatch.setattr(autoencoder, "set_slab_rows", noted)
        return VolumeCodec(autoencoder, settings.autoencoder, Precision(settings.device, CPU), budget_bytes), used

    return build


@pytest.mark.parametrize("mixed", [False, True])
def test_volumes_pass_in_the_precision_of_the_config_and_come_out_in_float32(codec_of, mixed):
    codec, _ = codec_of(device__mixed_precision=mixed, device__amp_dtype="bfloat16")
    inside = []
    for convolution in [module for module in codec.autoencoder.modules() if isinstance(module, torch.nn.Conv3d)]:
        convolution.register_forward_hook(lambda module, given, out: inside.append(out.dtype))
    mean = codec.encode(torch.rand(1, *GRID))
    volume = codec.decode(mean)
    assert set(inside) == {torch.bfloat16 if mixed else torch.float32}
    assert {mean.dtype, volume.dtype} == {torch.float32}


def test_levels_that_training_keeps_in_host_memory_are_kept_there_for_whole_volumes(codec_of, monkeypatch):
    codec, _ = codec_of(autoencoder__training__offload_levels=1, autoencoder__training__slab_rows=4)
    volume = mock.Mock(side_effect=codec.autoencoder.host.volume)
    monkeypatch.setattr(codec.autoencoder.host, "volume", volume)
    mean = codec.encode(torch.rand(1, *GRID))
    volume.assert_called()
    volume.reset_mock()
    codec.decode(mean)
    volume.assert_called()


NEEDED = 5 * 16 * 4 * torch.Size(GRID).numel()
"""Bytes of a block of full resolution, as the codec counts them."""


@pytest.mark.parametrize(
    ("budget", "configured", "expected"), [(1, 0, 4), (NEEDED - 1, 6, 6), (NEEDED - 1, 0, 16), (NEEDED, 0, 0)]
)
def test_slabs_come_on_where_a_block_exceeds_the_budget_and_change_nothing(codec_of, budget, configured, expected):
    codec, used = codec_of(budget, autoencoder__training__slab_rows=configured)
    whole, _ = codec_of(1 << 50)
    image = torch.rand(1, *GRID, generator=torch.Generator().manual_seed(1))
    mean = codec.encode(image)
    assert used == [expected, configured]
    volume = codec.decode(mean)
    assert used == [expected, configured] * 2
    torch.testing.assert_close(mean, whole.encode(image), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(volume, whole.decode(mean), rtol=1e-4, atol=1e-5)


@pytest.fixture
def small_volumes_count(monkeypatch):
    monkeypatch.setattr(volume_codec, "_HOST_ABOVE", 1 << 12)


def test_what_does_not_fit_in_slabs_passes_through_host_memory(codec_of, small_volumes_count, caplog):
    largest = 4 * 8 * torch.Size(GRID).numel()
    whole, _ = codec_of(1 << 50)
    image = torch.rand(1, *GRID, generator=torch.Generator().manual_seed(1))
    for budget, is_on_host in ((2 * largest, False), (largest, True), (0, True)):
        codec, used = codec_of(budget)
        caplog.clear()
        with caplog.at_level("INFO", logger="models"):
            mean = codec.encode(image)
            codec.encode(image)
        assert type(codec.host) is (HostSpace if is_on_host else DeviceSpace)
        (said,) = caplog.messages
        assert said.startswith("32x16x16: in slabs of")
        assert ("of host memory" in said) == is_on_host
        torch.testing.assert_close(mean, whole.encode(image), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(codec.decode(mean), whole.decode(mean), rtol=1e-4, atol=1e-5)
        assert used[-1] == 0
        assert codec.autoencoder.decoder.host is None, "training goes on without it"


class FullHost(MemoryObserver):
    def free_host_bytes(self) -> int:
        return 1 << 13


def test_a_budget_that_only_the_device_can_exceed_is_exceeded_in_words(codec_of, small_volumes_count, caplog):
    codec, _ = codec_of(0)
    with observed_by(FullHost()):
        codec.decode(torch.zeros(3, 16, 8, 8))
    assert codec.host is None
    assert "32x16x16: 0.0 GiB of host memory are too few, so it is computed on the device" in caplog.text


THREE_LEVELS = {"autoencoder__attention_levels": [False] * 3, "autoencoder__num_res_blocks": 1}
WIDE = {**THREE_LEVELS, "autoencoder__num_channels": [8, 8, 128], "autoencoder__strides": [[1, 2, 2], [1, 1, 2]]}
"""The volumes of the lowest level are larger than those of the two others together."""


@pytest.mark.parametrize(("changes", "host"), [({}, 1 << 13), (WIDE, 12 * 4 * torch.Size(GRID).numel())])
def test_too_little_host_memory_is_said_before_it_is_taken(codec_of, small_volumes_count, monkeypatch, changes, host):
    codec, _ = codec_of(0, **changes)
    monkeypatch.setattr(codec, "_device_bytes", lambda: 1 << 13)
    monkeypatch.setattr(FullHost, "free_host_bytes", lambda self: host)
    sentence = r"a volume of 32x16x16 takes .* GiB of host memory besides .* are free to this process .*; make room"
    with observed_by(FullHost()), pytest.raises(HostMemoryError, match=sentence):
        codec.encode(torch.zeros(1, *GRID))


def test_a_decode_keeps_to_its_budget_and_computes_less_twice_where_there_is_room(codec_of):
    def decode(budget: int, found: MemoryTracker) -> None:
        codec, _ = codec_of(budget, **THREE_LEVELS, autoencoder__num_channels=[32, 64, 128])
        found.reset()
        codec.decode(torch.zeros(3, 64, 64, 32))

    whole, least, tight, wide = (
        measure_peak(functools.partial(decode, budget), cuda=False) for budget in (1 << 50, 1 << 30, 3 << 29, 3 << 30)
    )
    assert least.peak["device"] < min(21 << 26, tight.peak["device"])  # 1 GiB is the largest volume
    assert tight.peak["device"] < min(3 << 29, 0.25 * whole.peak["device"])
    assert tight.peak["device"] < wide.peak["device"] < 3 << 30
    assert 1.5 * whole.flops.total() > tight.flops.total() > 1.05 * wide.flops.total()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_memory_that_slabs_free_goes_back_to_the_system():
    def given_back() -> int:
        blocks, process = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(64)], psutil.Process()
        before = process.memory_info().rss
        del blocks[::2]
        return before - process.memory_info().rss

    # Half of 128 MiB, because earlier tests leave free blocks in the heap, and these are used first.
    with freed_at_once():
        assert given_back() > 64 << 20
    assert given_back() < 64 << 20, "training keeps it for its next tensors"


NEW_PROCESS = """
import resource, torch
from models.volume_codec import freed_at_once

with freed_at_once():
    torch.ones(8 << 20, dtype=torch.uint8)
for _ in range(20):
    torch.ones(8 << 20, dtype=torch.uint8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_a_process_that_begins_with_slabs_keeps_the_memory_of_later_tensors():
    first, *_, last = map(int, subprocess.check_output([sys.executable, "-c", NEW_PROCESS], cwd=ROOT).split())
    # 8 MiB have 2048 pages, and 19 tensors of them follow the first. Where the heap lies decides how many are new: at
    # most 6 in 84 processes, and mostly all of them where glibc trims the heap at 128 KiB.
    assert last - first < 14 * 2048


def test_progress_is_shown_where_a_volume_passes_through_host_memory(
    codec_of, small_volumes_count, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for budget, is_shown in ((1 << 50, False), (0, True)):
        codec, _ = codec_of(budget)
        codec.decode(torch.zeros(3, 16, 8, 8))
        num_blocks = len(codec.autoencoder.decoder.blocks) - 3
        assert (f"/{num_blocks} [" in capsys.readouterr().err) == is_shown
