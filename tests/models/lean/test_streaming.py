"""Volumes that lie in host memory: encoded and decoded as whole ones are, whatever the host has room for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import build_autoencoder
from models.lean.layout import CHANNELS_LAST, CONTIGUOUS
from models.lean.rows import HostSpace, HostVolume, ReadAhead, Remembered
from settings import validate
from tests.models.gradients import small_work_counts
from tests.models.problems import with_lively_weights

PLENTY = 1 << 40
BYTES = st.sampled_from([0, 1 << 13, 1 << 15, 1 << 17])


def network(**shape: Any) -> Any:
    values = {"num_channels": [8, 16, 24], "norm_num_groups": 4, "attention_levels": [False] * 3, "latent_channels": 3}
    chosen = validate({"data": {"voxel_size": [32, 32, 32]}, "autoencoder": {**values, **shape}})
    torch.manual_seed(0)
    return with_lively_weights(build_autoencoder(chosen.autoencoder)).eval()


def passed(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Encode and decode; the latent that is decoded does not depend on how the volume was encoded."""
    latent = torch.randn(model.encode(x)[0].shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return *model.encode(x), model.decode(latent)


def in_both_ways(
    model: Any, x: torch.Tensor, rows: int, levels: int, host: HostSpace
) -> list[tuple[torch.Tensor, ...]]:
    results = []
    with small_work_counts(), torch.no_grad():
        for arguments in ((0,), (rows, levels, host)):
            model.set_slab_rows(*arguments)
            results.append(passed(model, x))
    return results


@settings(max_examples=30, deadline=None)
@given(
    variant=st.sampled_from(["monai", "maisi"]),
    strides=st.sampled_from([2, [[1, 2, 2], [2, 2, 2]], [[2, 1, 2], [1, 2, 2]]]),
    blocks=st.sampled_from([1, [2, 1, 0], [0, 2, 1]]),
    attention=st.booleans(),
    bottleneck=st.sampled_from(["kl", "vq"]),
    layout=st.sampled_from([CONTIGUOUS, CHANNELS_LAST]),
    batch=st.integers(1, 2),
    grid=st.tuples(*[st.sampled_from([8, 12, 20])] * 3),
    rows=st.integers(2, 9),
    levels=st.integers(1, 3),
    above=BYTES,
    free=st.sampled_from([0, 1 << 16, 1 << 17, 1 << 18, PLENTY]),
)
def test_volumes_on_the_host_are_those_of_the_device(
    variant, strides, blocks, attention, bottleneck, layout, batch, grid, rows, levels, above, free
):
    attention_levels = [False, False, attention]
    model = network(
        variant=variant,
        strides=strides,
        num_res_blocks=blocks,
        attention_levels=attention_levels,
        bottleneck=bottleneck,
    ).double()
    model.set_layout(layout)
    x = torch.randn(batch, 1, *grid, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    host = HostSpace(above, free)
    for expected, found in zip(*in_both_ways(model, x, rows, levels, host), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert host.free == free, "what was taken is free again"


@pytest.mark.parametrize("free", [0, 1 << 16, PLENTY])
def test_low_precision_on_the_host_errs_as_the_device_does(free):
    model, x = network(variant="maisi"), torch.randn(1, 1, 16, 12, 8)
    exact, _ = in_both_ways(model.double(), x.double(), 2, 3, HostSpace(0, free))
    with torch.autocast("cpu", torch.bfloat16):
        whole, streamed = in_both_ways(model.float(), x, 3, 3, HostSpace(0, free))
    for true, one, other in zip(exact, whole, streamed, strict=True):
        error, mine = (float((part.double() - true).norm()) for part in (one, other))
        assert mine <= 1.5 * error + 1e-9


def test_no_volume_above_the_limit_is_on_the_device(monkeypatch):
    model, x = network(), torch.randn(1, 1, 32, 16, 16)
    made: list[int] = []
    original = HostVolume.__init__

    def noted(self: HostVolume, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self._rows.numel())

    monkeypatch.setattr(HostVolume, "__init__", noted)
    in_both_ways(model, x, 4, 3, HostSpace(1 << 14, PLENTY))
    assert max(made) == 16 * 32 * 16 * 16, "the upsampled volume with the channels of the level below"
    assert min(made) * 4 > 1 << 14


class Counted(HostVolume):
    """Counts the rows that are read."""

    count = 0

    def start_reading(self, start: int, end: int) -> Any:
        self.count += end - start
        return super().start_reading(start, end)


@pytest.mark.parametrize("ahead", [False, True])
def test_remembered_rows_are_read_once(ahead):
    values = torch.randn(1, 3, 17, 4, 5)
    volume = Counted(values)
    volume.write(0, values)
    remembered = Remembered(ReadAhead(volume, 4) if ahead else volume)
    for start in range(0, 17, 4):
        first, last = max(start - 2, 0), min(start + 6, 17)
        assert torch.equal(remembered.rows(first, last), values[:, :, first:last])
        assert torch.equal(remembered.rows(start, min(start + 4, 17)), values[:, :, start : start + 4])
    assert volume.count == 17
