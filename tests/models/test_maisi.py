"""MAISI's autoencoder: its weights in our network compute the same, in every dtype, layout and memory setting."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from monai.apps.generation.maisi.networks.autoencoderkl_maisi import AutoencoderKlMaisi

from models import build_autoencoder
from models.exchange.weights import find_state, to_our_names
from models.frozen_autoencoder import autoencoder_of, check_pretrained, latents_digest
from models.lean.layout import CHANNELS_LAST
from models.lean.resampling import Enlarged
from settings import CheckpointError, stored, validate
from tests.models.autoencoders import stock_like
from tests.models.gradients import BATCHES, DTYPES, Problem, small_work_counts
from tests.models.layouts import channels_last
from tests.models.problems import AUTOENCODER_KNOBS, autoencoder_settings, run_autoencoder, volumes, with_lively_weights
from tests.support.tiny_config import TINY

SHAPE = {"variant": "maisi", "num_channels": [8, 8, 16], "attention_levels": [False, False, True]}
FEW = ("lean", "slabs of 4, nested, offloaded")


def settings_of(knobs, **shape):
    return autoencoder_settings(knobs, **{**SHAPE, **shape})


def interpolating(settings):
    """Build a network with MAISI's decoder and MONAI's range, which is the plain network's."""
    model = build_autoencoder(settings)
    model.value_range = "symmetric"
    return model


@cache
def problem(batch):
    """MONAI's network whose upsampling is told to interpolate."""
    torch.manual_seed(batch)
    plain = with_lively_weights(stock_like(settings_of({})))
    for block in plain.decoder.blocks:
        if hasattr(block, "upsample_non_trainable"):
            block.upsample_non_trainable = torch.nn.Upsample(scale_factor=2, mode="trilinear", align_corners=False)
    return Problem(plain, run_autoencoder, [volumes(batch, 2, 12, 8, 4), torch.randn(batch, 3, 3, 2, 1)])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interpolating_decoders_have_the_gradients_of_a_plain_network(dtype, batch):
    for knob in FEW:
        problem(batch).assert_as_close_as_stock(interpolating(settings_of(AUTOENCODER_KNOBS[knob])), dtype)


@pytest.mark.parametrize("knob", AUTOENCODER_KNOBS)
def test_every_memory_knob_has_the_gradients_of_a_plain_network(knob):
    problem(2).assert_as_close_as_stock(interpolating(settings_of(AUTOENCODER_KNOBS[knob])), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_last_has_the_gradients_of_a_plain_network(dtype):
    for knob in FEW:
        model = interpolating(settings_of(AUTOENCODER_KNOBS[knob]))
        model.set_layout(CHANNELS_LAST)
        problem(3).assert_as_close_as_stock(model, dtype, arrange=channels_last)


@pytest.mark.parametrize("rows", [2, 3, 7])
def test_inference_in_slabs_gives_the_volumes_of_a_plain_network(rows):
    given = problem(2)
    model = interpolating(settings_of({"slab_rows": rows})).eval().double()
    model.load_state_dict(given.stock.state_dict())
    x, none = given.inputs[0].double(), torch.zeros(1)
    with small_work_counts(), torch.inference_mode():
        found, expected = (run_autoencoder(network, x, none) for network in (model, given.stock.double()))
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_interpolated_values_are_rounded_once(dtype):
    torch.manual_seed(0)
    x = torch.randn(1, 4, 6, 6, 6).to(dtype)
    exact = torch.nn.functional.interpolate(x.double(), scale_factor=2, mode="trilinear").to(dtype)
    assert float((Enlarged(x, (2, 2, 2), dtype).rows(0, 12) == exact).double().mean()) > 0.99


def maisi(attention=False, **options):
    torch.manual_seed(0)
    network = AutoencoderKlMaisi(
        spatial_dims=3, in_channels=1, out_channels=1, num_channels=(8, 8, 16), num_res_blocks=(1, 1, 1),
        latent_channels=3, norm_num_groups=4, attention_levels=(False, False, attention), num_splits=2, dim_split=1,
        with_encoder_nonlocal_attn=attention, with_decoder_nonlocal_attn=attention, **options,
    )  # fmt: skip
    return with_lively_weights(network)


def ours_with(weights, attention, **knobs):
    shape = {"in_channels": 1, "attention_levels": [False, False, attention]}
    model = build_autoencoder(settings_of(knobs, **shape))
    network, state = find_state({"unet": None, "autoencoder": weights}, Path("maisi.pt"))
    assert network == "autoencoder"
    model.load_state_dict(to_our_names(state, "maisi", Path("maisi.pt")), strict=True)
    return model


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("rows", [0, 4])
def test_imported_weights_compute_what_maisi_computes(attention, rows):
    theirs = maisi(attention, include_fc=attention)
    ours = ours_with(theirs.state_dict(), attention, slab_rows=rows)
    x = torch.rand(1, 1, 8, 64, 8)
    with small_work_counts(), torch.no_grad():
        mean, sigma = theirs.encode(x)
        own_mean, own_sigma = ours.encode(2 * x - 1)
        torch.testing.assert_close(own_mean, mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own_sigma, sigma, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.decode(mean), 2 * theirs.decode(mean) - 1, rtol=1e-5, atol=1e-5)


def test_imported_weights_have_the_gradients_of_maisi(monkeypatch):
    # MAISI's norm rounds to fp32 whatever it is given, so in double precision it is told not to.
    monkeypatch.setattr(torch, "float32", torch.float64)
    theirs = maisi().double()
    monkeypatch.undo()
    ours = ours_with(theirs.state_dict(), False).double()
    x, noise = torch.rand(1, 1, 8, 64, 8).double(), torch.randn(1, 3, 2, 16, 2).double()
    direction = torch.randn(x.shape).double()
    for network, volume, scale in ((theirs, x, 1.0), (ours, 2 * x - 1, 0.5)):
        with monkeypatch.context() as patch:
            if network is theirs:
                patch.setattr(torch, "float32", torch.float64)
            mean, sigma = network.encode(volume)
            (scale * network.decode(mean + sigma * noise) * direction).sum().backward()
    gradients = {key: p.grad for key, p in theirs.named_parameters()}
    expected = to_our_names({**theirs.state_dict(), **gradients}, "maisi", Path("maisi.pt"))
    size = sum(float(p.square().sum()) for p in expected.values()) ** 0.5
    for key, parameter in ours.named_parameters():
        assert float((parameter.grad - expected[key]).norm()) <= 1e-12 * size, key


def test_weights_of_another_library_are_told_apart():
    path = Path("w.pt")
    with pytest.raises(CheckpointError, match=r"holds MAISI's autoencoder, which --from monai does not fit; use maisi"):
        to_our_names(maisi().state_dict(), "monai", path)
    stock = stock_like(settings_of({})).state_dict()
    with pytest.raises(CheckpointError, match=r"holds MONAI's autoencoder, which --from maisi does not fit"):
        to_our_names(stock, "maisi", path)


@pytest.mark.parametrize("value", ["monai_unit", "maisi"])
def test_weights_are_refused_by_a_config_that_would_compute_something_else_with_them(tmp_path, value):
    plain = validate(copy.deepcopy(TINY))
    other = copy.deepcopy(TINY)
    other["autoencoder"]["variant"] = value
    metadata = {"stage": "autoencoder", "settings": stored(validate(other))}
    with pytest.raises(CheckpointError, match=r"autoencoder\.variant"):
        autoencoder_of(plain, {}, metadata, tmp_path)
    with pytest.raises(CheckpointError, match=r"pretrained .* has different settings:\n  autoencoder\.variant"):
        check_pretrained(plain.autoencoder, metadata, tmp_path)
    check_pretrained(validate(other).autoencoder, metadata, tmp_path)


def test_latents_of_another_range_are_others():
    digests = set()
    for value in ("monai", "monai_unit"):
        torch.manual_seed(0)
        digests.add(latents_digest(build_autoencoder(settings_of({}, variant=value))))
    assert len(digests) == 2
