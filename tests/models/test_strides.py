"""Autoencoders whose strides differ by axis: the gradients of a plain network, under every memory knob."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from memory.predict.step import build_step
from models import LeanAutoencoder, build_autoencoder
from models.exchange.networks import monai_arguments
from models.frozen_autoencoder import autoencoder_of
from models.lean.layout import CHANNELS_LAST
from settings import CheckpointError, stored, validate
from tests.models.gradients import BATCHES, DTYPES, Problem, small_work_counts
from tests.models.layouts import channels_last
from tests.models.problems import (
    AUTOENCODER_KNOBS,
    autoencoder_settings,
    run_autoencoder,
    run_decoder,
    volumes,
    with_lively_weights,
)
from tests.models.strided import strided_like
from tests.support.tiny_config import TINY

# Thick slices along the last axis; and slabs cut along an axis that the first level does not shrink, odd at the end.
STRIDES = {
    "last axis": (((2, 2, 1), (2, 2, 2)), (8, 8, 10)),
    "first axis, then last": (((1, 2, 2), (2, 2, 1)), (10, 8, 6)),
}
SHAPE = {"num_channels": [8, 8, 16], "attention_levels": [False, False, True]}
LEAN_KNOBS = {name: knobs for name, knobs in AUTOENCODER_KNOBS.items() if "implementation" not in knobs}
SLABS = ("lean", "slabs of 3", "slabs of 4, nested, offloaded")


def settings_of(name, knobs):
    return autoencoder_settings(knobs, strides=STRIDES[name][0], **SHAPE)


@cache
def problem(name, batch):
    torch.manual_seed(batch)
    settings, grid = settings_of(name, {}), STRIDES[name][1]
    noise = torch.randn(batch, 3, *settings.latent_grid(grid))
    plain = with_lively_weights(strided_like(settings))
    return Problem(plain, run_autoencoder, [volumes(batch, 2, *grid), noise], cuda=batch > 2)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_as_close_to_the_truth_as_those_of_a_plain_network(dtype, batch):
    name = list(STRIDES)[1 - batch % 2]
    for knob in SLABS:
        problem(name, batch).assert_as_close_as_stock(build_autoencoder(settings_of(name, LEAN_KNOBS[knob])), dtype)


@pytest.mark.parametrize("knob", LEAN_KNOBS)
def test_every_memory_knob_has_the_gradients_of_a_plain_network(knob):
    number = list(LEAN_KNOBS).index(knob) % 2
    name, batch = list(STRIDES)[number], number + 1
    problem(name, batch).assert_as_close_as_stock(build_autoencoder(settings_of(name, LEAN_KNOBS[knob])), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_last_has_the_gradients_of_a_plain_network(dtype):
    name = "first axis, then last"
    for knob in ("lean", "slabs of 3"):
        model = build_autoencoder(settings_of(name, LEAN_KNOBS[knob]))
        model.set_layout(CHANNELS_LAST)
        problem(name, 4).assert_as_close_as_stock(model, dtype, arrange=channels_last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_frozen_decoder_has_the_gradients_of_a_plain_one(dtype):
    name, batch = "first axis, then last", 3
    torch.manual_seed(0)
    plain = with_lively_weights(strided_like(settings_of(name, {}))).requires_grad_(False)
    decoding = Problem(plain, run_decoder, [volumes(batch, 3, 5, 2, 3)])
    for knob in ("lean", "checkpointed", "slabs of 3", "slabs of 5, offloaded"):
        model = build_autoencoder(settings_of(name, LEAN_KNOBS[knob])).requires_grad_(False)
        decoding.assert_as_close_as_stock(model, dtype)


@pytest.mark.parametrize("rows", [2, 3, 7])
@pytest.mark.parametrize("name", STRIDES)
def test_inference_in_slabs_gives_the_volumes_of_a_plain_network(name, rows):
    given = problem(name, 2)
    model = build_autoencoder(settings_of(name, {"slab_rows": rows})).eval().double()
    model.load_state_dict(given.stock.state_dict())
    plain, x, none = given.stock.double(), given.inputs[0].double(), torch.zeros(1)
    with small_work_counts(), torch.inference_mode():
        for found, expected in zip(run_autoencoder(model, x, none), run_autoencoder(plain, x, none), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert model.encode(x)[0].shape[2:] == settings_of(name, {}).latent_grid(x.shape[2:])


def test_the_encoder_has_the_gradients_of_a_plain_one_on_a_grid_that_no_level_divides():
    torch.manual_seed(0)
    name = "last axis"
    plain = with_lively_weights(strided_like(settings_of(name, {})))
    encoding = Problem(plain, lambda network, x: network.encode(x), [volumes(2, 2, 13, 9, 11)])
    for rows in (0, 2, 4):
        encoding.assert_as_close_as_stock(build_autoencoder(settings_of(name, {"slab_rows": rows})), torch.float64)


def test_strides_of_two_written_out_change_no_bit():
    x = volumes(2, 2, 8, 8, 4)
    found = []
    for strides in (2, [[2, 2, 2], [2, 2, 2]]):
        torch.manual_seed(0)
        model = build_autoencoder(autoencoder_settings({"slab_rows": 2}, strides=strides, **SHAPE))
        assert isinstance(model, LeanAutoencoder)
        reconstruction, mean, _ = model(x, torch.zeros(2, 3, 2, 2, 1))
        (reconstruction.sum() + mean.sum()).backward()
        found.append((list(model.state_dict()), reconstruction, [p.grad for p in model.parameters()]))
    (keys, first, gradients), (other_keys, second, other_gradients) = found
    assert keys == other_keys
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))


def test_weights_are_not_exchanged_with_monai_which_has_no_such_strides():
    thick, even = (validate({"autoencoder": {"strides": strides}}) for strides in ([[2, 2, 1], [2, 2, 2]], 2))
    with pytest.raises(CheckpointError, match=r"\[\[2, 2, 1\], \[2, 2, 2\]\]; MONAI's AutoencoderKL has"):
        monai_arguments("autoencoder", thick)
    assert monai_arguments("ldm", thick) == monai_arguments("ldm", even)


def test_weights_trained_with_other_strides_are_refused_by_stage_2(tmp_path):
    thick, even = (validate({"autoencoder": {"strides": strides}}) for strides in ([[2, 2, 1], [2, 2, 2]], 2))
    metadata = {"stage": "autoencoder", "settings": stored(even)}
    with pytest.raises(CheckpointError, match=r"autoencoder.strides: \[\[2, 2, 2\], .* -> \[\[2, 2, 1\], "):
        autoencoder_of(thick, {}, metadata, tmp_path)


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_a_step_of_each_stage_trains(stage):
    values = copy.deepcopy(TINY)
    values["autoencoder"]["strides"] = [[2, 2, 1]] * (len(values["autoencoder"]["num_channels"]) - 1)
    values["ldm"]["training"]["pixel_loss"] = {"weight": 0.1}
    step = build_step(validate(values), stage)
    result = step([step.example_batch(2)], 1)
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in result.values())
