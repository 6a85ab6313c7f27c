"""Volumes in host memory: coded as whole ones are, trained with the gradients of the device, in a fraction of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memory.predict.emulation import measure_peak
from models import build_autoencoder
from models.autoencoder import announce_offloaded, offloaded_bytes
from models.lean.layout import CHANNELS_LAST, CONTIGUOUS
from models.lean.rows import DeviceSpace, HostMemoryError, HostSpace, HostVolume, ReadAhead, Relocatable, Remembered
from runtime.observer import MemoryObserver, observed_by
from runtime.precision import Precision, move
from settings import ConfigError, Settings, validate
from tests.models.gradients import direction, small_work_counts
from tests.models.problems import with_lively_weights
from training.ldm_step import PixelLoss

PLENTY = 1 << 40
SHAPES = st.fixed_dictionaries(
    {
        "variant": st.sampled_from(["monai", "maisi"]),
        "strides": st.sampled_from([2, [[1, 2, 2], [2, 2, 2]], [[2, 1, 2], [1, 2, 2]]]),
        "num_res_blocks": st.sampled_from([1, [2, 1, 0], [0, 2, 1], [1, 0, 1]]),
        "attention_levels": st.sampled_from([[False] * 3, [False, False, True]]),
        "bottleneck": st.sampled_from(["kl", "vq"]),
    }
)
LAYOUTS = st.sampled_from([CONTIGUOUS, CHANNELS_LAST])


def network(**shape: Any) -> Any:
    values = {"num_channels": [8, 16, 24], "norm_num_groups": 4, "attention_levels": [False] * 3, "latent_channels": 3}
    chosen = validate({"data": {"voxel_size": [32, 32, 32]}, "autoencoder": {**values, **shape}})
    torch.manual_seed(0)
    return with_lively_weights(build_autoencoder(chosen.autoencoder))


def gradients(model: Any, x: Tensor, latent: Tensor) -> dict[str, Tensor]:
    """Results and gradients of encoding a volume and decoding a latent; the volume need not be one that is decoded."""
    model.zero_grad()
    x, latent = x.clone().requires_grad_(), latent.clone().requires_grad_()
    with small_work_counts():
        outputs = [*model.encode(x), model.decode(latent)]
        wanted = [out for out in outputs if out.requires_grad]
        torch.autograd.backward(wanted, [direction(out.shape).to(out.dtype) for out in wanted])
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found |= {"volume": x.grad, "latent": latent.grad}
    found |= {f"output {index}": out.detach() for index, out in enumerate(outputs)}
    return {name: tensor.double().clone() for name, tensor in found.items() if tensor is not None}


def inputs(model: Any, batch: int, grid: tuple[int, ...], latent_grid: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(batch, 1, *grid, generator=draw), torch.randn(batch, 3, *latent_grid, generator=draw)


def in_both_ways(model: Any, x: Tensor, rows: int, levels: int, host: HostSpace) -> list[tuple[Tensor, ...]]:
    """Encode and decode on the device and from the host; the latent that is decoded does not depend on the first."""
    results: list[tuple[Tensor, ...]] = []
    with small_work_counts(), torch.no_grad():
        for arguments in ((0,), (rows, levels, host)):
            model.set_slab_rows(*arguments)
            mean, sigma = model.encode(x)
            latent = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
            results.append((mean, sigma, model.decode(latent)))
    return results


@settings(max_examples=16, deadline=None)
@given(
    shape=SHAPES,
    layout=LAYOUTS,
    batch=st.integers(1, 2),
    grid=st.tuples(*[st.sampled_from([8, 12, 20])] * 3),
    rows=st.integers(2, 9),
    levels=st.integers(1, 3),
    above=st.sampled_from([None, 0, 1 << 13, 1 << 15, 1 << 17]),
    free=st.sampled_from([0, 1 << 16, 1 << 17, 1 << 18, PLENTY]),
)
def test_volumes_in_slabs_are_those_of_the_whole(shape, layout, batch, grid, rows, levels, above, free):
    model = network(**shape).eval().double()
    model.set_layout(layout)
    x = torch.randn(batch, 1, *grid, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    host = DeviceSpace(free) if above is None else HostSpace(above, free)
    for expected, found in zip(*in_both_ways(model, x, rows, levels, host), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert host.free == free, "what was taken is free again"


@pytest.mark.parametrize("variant", ["monai", "maisi"])
@pytest.mark.parametrize("strides", [2, [[1, 2, 2], [2, 2, 2]]])
def test_a_volume_that_moves_into_what_is_computed_from_it_is_read_before_it_is_overwritten(variant, strides):
    # The more channels a level has, the later its last rows are read.
    model = network(variant=variant, strides=strides, num_channels=[8, 32, 32]).eval().double()
    model.set_layout(CHANNELS_LAST)
    x = torch.randn(1, 1, 32, 4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for rows in (2, 3, 9):
        with mock.patch.object(Relocatable, "move_to_end", autospec=True, side_effect=Relocatable.move_to_end) as move:
            whole, shared = in_both_ways(model, x, rows, 3, DeviceSpace(0))
        assert move.call_count == 2
        torch.testing.assert_close(shared, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("free", [0, 1 << 16, PLENTY])
def test_low_precision_on_the_host_errs_as_the_device_does(free):
    model, x = network(variant="maisi").eval(), torch.randn(1, 1, 16, 12, 8)
    exact, _ = in_both_ways(model.double(), x.double(), 2, 3, HostSpace(0, free))
    with torch.autocast("cpu", torch.bfloat16):
        whole, streamed = in_both_ways(model.float(), x, 3, 3, HostSpace(0, free))
    for true, one, other in zip(exact, whole, streamed, strict=True):
        error, mine = (float((part.double() - true).norm()) for part in (one, other))
        assert mine <= 1.5 * error + 1e-9


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


@settings(max_examples=16, deadline=None)
@given(
    shape=SHAPES,
    layout=LAYOUTS,
    batch=st.integers(1, 2),
    grid=st.tuples(*[st.sampled_from([8, 9, 11, 12])] * 3),
    latent_grid=st.tuples(*[st.integers(2, 4)] * 3),
    rows=st.integers(2, 9),
    levels=st.integers(1, 2),
    nested=st.booleans(),
    frozen=st.sampled_from(["nothing", "encoder", "all"]),
)
def test_gradients_are_those_of_the_device(shape, layout, batch, grid, latent_grid, rows, levels, nested, frozen):
    model = network(**shape).double()
    if frozen == "all":
        model.requires_grad_(False)
    elif frozen == "encoder":
        model.freeze_encoder()
    x, latent = (part.double() for part in inputs(model, batch, grid, latent_grid))
    model.set_layout(layout)
    expected = gradients(model, x, latent)
    model.set_layout(CONTIGUOUS)
    model.offload_levels(levels, rows, nested)
    model.set_layout(layout)  # gives the network other parameters
    found = gradients(model, x, latent)
    assert found.keys() == expected.keys()
    size = sum(float(part.square().sum()) for part in expected.values()) ** 0.5
    for name, true in expected.items():
        off = float((found[name] - true).norm())
        assert off <= 1e-12 * max(float(true.norm()), 1e-3 * size), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["monai", "maisi"])
def test_low_precision_errs_as_on_the_device(variant, dtype):
    model = network(variant=variant)
    x, latent = inputs(model, 1, (12, 8, 8), (3, 2, 2))
    truth = gradients(model.double(), x.double(), latent.double())
    model.float()
    errors = []
    for levels in (0, 2):
        if levels:
            model.offload_levels(levels, 3)
        with torch.autocast("cpu", dtype):
            found = gradients(model, x, latent)
        names = [name for name in truth if not name.startswith("output")]
        errors.append(sum(float((found[name] - truth[name]).square().sum()) for name in names) ** 0.5)
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("bottleneck", ["kl", "vq"])
def test_pixel_loss_has_the_same_gradient_through_levels_in_host_memory(bottleneck):
    model = network(variant="maisi", bottleneck=bottleneck).double().requires_grad_(False).eval()
    precision = Precision(Settings().with_overrides({"device.mixed_precision": False}).device, torch.device("cpu"))
    loss = PixelLoss(Settings().ldm.training.pixel_loss, model, precision)
    predicted, clean = torch.randn(2, 2, 3, 3, 5, 2, generator=torch.Generator().manual_seed(3)).double()
    expected = loss(predicted, clean, torch.tensor([1.0, 0.5]), 2.0)
    model.offload_levels(2, 3)
    for found, true in zip(loss(predicted, clean, torch.tensor([1.0, 0.5]), 2.0), expected, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-6, atol=1e-9)  # the loss is in fp32


def test_device_holds_slabs_and_no_whole_volume_of_the_offloaded_levels():
    def peak(levels: int) -> tuple[int, int]:
        def step(tracker):
            model = move(network(num_channels=[32, 64, 64]), torch.device("cpu"), "auto")
            if levels:
                model.offload_levels(levels, 4)
            x = torch.zeros(1, 1, 256, 64, 64)
            tracker.reset()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x)[0].mean()
            loss.backward()

        tracker = measure_peak(step)
        return tracker.peak["device"], tracker.peak["host"]

    (whole, nothing), (device, host) = peak(0), peak(2)
    volume = 2 * 32 * 256 * 64 * 64
    assert nothing == 0
    assert host > 3 * volume
    assert device < whole / 8
    assert device < 1.5 * volume, "a volume of one level, less than what one block needs on the device"


class SmallHost(MemoryObserver):
    def free_host_bytes(self) -> int:
        return 1 << 14


@pytest.mark.parametrize("nested", [False, True])
def test_host_memory_of_a_step_is_known_before_it_is_taken(nested, caplog):
    training = {"offload_levels": 2, "use_nested_checkpointing": nested, "use_gradient_checkpointing": True}
    chosen = validate({"autoencoder": {"num_channels": [8, 16, 16], "training": training}}).autoencoder
    precision = Precision(Settings().device, torch.device("cpu"))
    grid = (16, 8, 12)
    known = offloaded_bytes(chosen, 2, grid, precision)
    model = build_autoencoder(chosen)
    for _ in range(2):
        with precision.autocast():
            model(torch.zeros(2, 1, *grid))[0].mean().backward()
        assert model.host.taken == known, "the next step takes what this one gives back"
    with caplog.at_level("INFO", logger="models"):
        announce_offloaded(chosen, 2, grid, precision)
    assert "the 2 highest levels of the autoencoder take 0.0 GiB of host memory" in caplog.text
    sentence = (
        r"training.offload_levels: its volumes take .* GiB of host memory; .* are free to this process .*; make room"
    )
    with observed_by(SmallHost()), pytest.raises(HostMemoryError, match=sentence):
        announce_offloaded(chosen, 2, grid, precision)
    again = build_autoencoder(chosen)
    with observed_by(SmallHost()), pytest.raises(HostMemoryError, match=sentence):
        again(torch.zeros(2, 1, *grid))


@pytest.mark.parametrize(
    ("attention", "levels", "most"), [([False, False, False], 3, 2), ([False, True, True], 2, 1), ([True] * 3, 1, 0)]
)
def test_levels_that_cannot_be_in_host_memory_are_refused(attention, levels, most):
    values = {"num_channels": [8, 16, 16], "attention_levels": attention, "training": {"offload_levels": levels}}
    with pytest.raises(ConfigError, match=rf"offload_levels: {levels} of 3 levels; .*; allowed: at most {most}"):
        validate({"autoencoder": values})
