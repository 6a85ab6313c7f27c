"""MAISI's autoencoder: its weights in our network compute the same. Gradients: test_gradients.py."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from monai.apps.generation.maisi.networks.autoencoderkl_maisi import AutoencoderKlMaisi

from models import build_autoencoder
from models.exchange import find_state, to_our_names
from models.frozen_autoencoder import autoencoder_of, check_pretrained, latents_digest
from models.lean.resampling import Enlarged
from settings import CheckpointError, stored, validate
from tests.models.autoencoders import stock_like
from tests.models.gradients import small_work_counts
from tests.models.problems import autoencoder_settings, with_lively_weights
from tests.support.tiny_config import TINY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_interpolated_values_are_rounded_once(dtype):
    x = torch.randn(1, 4, 6, 6, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
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
    levels = {"num_channels": [8, 8, 16], "attention_levels": [False, False, attention]}
    model = build_autoencoder(autoencoder_settings(knobs, variant="maisi", in_channels=1, **levels))
    network, state = find_state({"unet": None, "autoencoder": weights}, Path("maisi.pt"))
    assert network == "autoencoder"
    model.load_state_dict(to_our_names(state, "maisi", Path("maisi.pt")), strict=True)
    return model


@pytest.mark.parametrize(("attention", "rows"), [(False, 4), (True, 0), (True, 4)])
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


def test_weights_of_another_library_are_told_apart():
    path = Path("w.pt")
    with pytest.raises(CheckpointError, match=r"holds MAISI's autoencoder, which --from monai does not fit; use maisi"):
        to_our_names(maisi().state_dict(), "monai", path)
    stock = stock_like(autoencoder_settings({})).state_dict()
    with pytest.raises(CheckpointError, match=r"holds MONAI's autoencoder, which --from maisi does not fit"):
        to_our_names(stock, "maisi", path)


@pytest.mark.parametrize(
    ("key", "value"), [("variant", "monai_unit"), ("variant", "maisi"), ("strides", [[2, 2, 1], [2, 2, 2]])]
)
def test_weights_are_refused_by_a_config_that_would_compute_something_else_with_them(tmp_path, key, value):
    tiny = copy.deepcopy(TINY)
    tiny["autoencoder"] |= {"num_channels": [8, 8, 8], "attention_levels": [False] * 3}
    plain = validate(copy.deepcopy(tiny))
    tiny["autoencoder"][key] = value
    other = validate(tiny)
    metadata = {"stage": "autoencoder", "settings": stored(other)}
    with pytest.raises(CheckpointError, match=rf"autoencoder\.{key}: "):
        autoencoder_of(plain, {}, metadata, tmp_path)
    with pytest.raises(CheckpointError, match=rf"trained with different settings:\n  autoencoder\.{key}"):
        check_pretrained(plain.autoencoder, metadata, tmp_path)
    check_pretrained(other.autoencoder, metadata, tmp_path)


def test_latents_of_another_range_are_others():
    model = build_autoencoder(autoencoder_settings({}))
    before, model.value_range = latents_digest(model), "unit"
    assert latents_digest(model) != before
