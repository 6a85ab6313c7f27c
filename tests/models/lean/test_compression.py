"""Block inputs in 8 bits: what they come back as, what they take, and how far they move gradients."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch

from models import build_autoencoder
from models.lean import compression
from models.lean.checkpointing import HostOffload
from models.lean.compression import GROUP, Compressed, Compression, compress, expand
from tests.models.gradients import distances, run_backward, small_work_counts
from tests.models.layouts import channels_last
from tests.models.problems import autoencoder_settings, problem, run_autoencoder

LIMIT = 0.01
CHECKPOINTED = {"use_gradient_checkpointing": True}


@pytest.mark.parametrize("arrange", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 6, 7), (1, 16, 8, 8, 8), (3, 1, 2, 2, 2), (1, 4, 1, 128, 3)], ids=str)
def test_volumes_come_back_as_they_were_up_to_their_levels(shape, dtype, arrange):
    torch.manual_seed(0)
    x = arrange((torch.randn(shape) * torch.logspace(-2, 2, shape[1]).view(1, -1, 1, 1, 1) - 3).to(dtype))
    for most in (1 << 22, 300):
        with mock.patch.object(compression, "PIECE_VALUES", most):
            found = expand(compress(x))
        assert (found.dtype, found.stride()) == (x.dtype, x.stride())
        for mine, true in zip(found.double().unbind(1), x.double().unbind(1), strict=True):
            assert float((mine - true).norm() / true.norm()) < LIMIT


def test_each_group_has_its_own_levels_and_its_ends_are_kept():
    x = torch.linspace(0, 1, 2 * GROUP).view(1, 1, 1, 2, GROUP)
    x[..., 1, :] *= 1000
    found = expand(compress(x))
    for group, true in zip(found[0, 0, 0], x[0, 0, 0], strict=True):
        assert float((group - true).abs().max()) <= 0.51 / 255 * float(true.max() - true.min())
        torch.testing.assert_close(group[[0, -1]], true[[0, -1]], rtol=1e-6, atol=0)


def test_constant_volumes_are_kept_exactly_and_what_is_not_finite_stays_so():
    for value in (0.0, 5.0):
        assert torch.equal(expand(compress(torch.full((1, 2, 4, 4, 4), value))), torch.full((1, 2, 4, 4, 4), value))
    broken = torch.zeros(1, 1, 4, 4, 4)
    broken[0, 0, 0, 0, 0] = torch.nan
    assert not expand(compress(broken)).isfinite().all()


@pytest.mark.parametrize("largest", [3, 300, 600, 1971, 40_000, 1 << 23, 1 << 26])
def test_values_too_small_for_normal_numbers_keep_their_order(largest):
    x = (torch.linspace(-1, 1, GROUP) * largest).trunc().view(1, 1, 1, 1, GROUP) * 2.0**-149
    found = expand(compress(x))
    assert bool((found.diff() >= 0).all())
    assert float((found.double() - x.double()).abs().max()) <= max(2.0**-127, 2**-4 * float(x.max()))


def test_a_volume_in_16_bits_takes_little_more_than_half():
    x = torch.randn(1, 8, 16, 16, 16).bfloat16()
    packed = compress(x)
    bytes_kept = sum(part.numel() * part.element_size() for part in (packed.codes, packed.low, packed.step))
    assert bytes_kept / (x.numel() * x.element_size()) <= 0.54


def found_with(network, batch, dtype=torch.float32, arrange=torch.Tensor.contiguous):
    given = problem("autoencoder", batch)
    network.load_state_dict(given.stock.state_dict())
    with small_work_counts(), mock.patch.object(compression, "MIN_OFFLOAD_BYTES", 0):
        found = run_backward(network.train(), run_autoencoder, given.inputs, dtype, arrange)
    return distances(found, given.truth)


@pytest.mark.parametrize("knobs", [{}, {"slab_rows": 3}, {"use_nested_checkpointing": True}], ids=str)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_int8_moves_gradients_less_than_bf16_does(batch, offload, knobs):
    own = problem("autoencoder", batch).stock_distances(torch.bfloat16).total
    where = {"use_gradient_checkpointing_offload": True} if offload else {}
    model = build_autoencoder(autoencoder_settings({**CHECKPOINTED, **knobs, **where, "checkpoint_dtype": "int8"}))
    found = found_with(model, batch).total
    assert found < own
    assert found > 1e-5, "the block inputs were not compressed"


def test_the_forward_pass_is_the_same_and_offloading_changes_no_bit():
    given = problem("autoencoder", 2)
    results = []
    for more in (
        {},
        {"checkpoint_dtype": "int8"},
        {"checkpoint_dtype": "int8", "use_gradient_checkpointing_offload": True},
    ):
        model = build_autoencoder(autoencoder_settings({**CHECKPOINTED, **more}))
        model.load_state_dict(given.stock.state_dict())
        with small_work_counts(), mock.patch.object(compression, "MIN_OFFLOAD_BYTES", 0):
            results.append(run_backward(model.train(), run_autoencoder, given.inputs, torch.float32))
    plain, packed, offloaded = results
    assert all(torch.equal(a, b) for a, b in zip(plain.outputs, packed.outputs, strict=True))
    assert all(torch.equal(packed.gradients[name], offloaded.gradients[name]) for name in packed.gradients)
    assert any(not torch.equal(plain.gradients[name], packed.gradients[name]) for name in packed.gradients)


@pytest.mark.parametrize("knobs", [{}, {"slab_rows": 3}], ids=str)
def test_a_nested_encoder_keeps_no_codes_before_backward_and_the_same_gradients(knobs, monkeypatch):
    kept: list[weakref.ref[torch.Tensor]] = []

    def watched(x):
        packed = compress(x)
        kept.append(weakref.ref(packed.codes))
        return packed

    monkeypatch.setattr(compression, "compress", watched)
    monkeypatch.setattr(compression, "MIN_OFFLOAD_BYTES", 0)
    given, found = problem("autoencoder", 2), []
    for nested in (False, True):
        training = {**CHECKPOINTED, **knobs, "use_nested_checkpointing": nested, "checkpoint_dtype": "int8"}
        model = build_autoencoder(autoencoder_settings(training)).train()
        model.load_state_dict(given.stock.state_dict())
        kept.clear()
        with small_work_counts():
            mean, sigma = model.encode(given.inputs[0])
            alive = sum(codes() is not None for codes in kept)
            assert alive == (0 if nested else len(kept))
            assert len(kept) > 3
            model.decode(mean + sigma).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(once, again) for once, again in zip(*found, strict=True))


def test_the_codes_of_the_block_before_are_fetched_while_a_block_runs_backward():
    offload = HostOffload()
    keep = Compression(offload)
    with small_work_counts(), mock.patch.object(compression, "MIN_OFFLOAD_BYTES", 0):
        first, second = (keep._pack(torch.randn(1, 2, 4, 4, 4)) for _ in range(2))
        assert isinstance(first, Compressed)
        assert [packed.dtype for packed, _ in offload._leaving] == [torch.uint8], "the large copy is the one in flight"
        keep._unpack(second)
    assert first.codes.fetched is not None
