"""Bytes of one pass, from fake tensors under CUDA's autocast rules, against stock MONAI measured in the same way."""

from functools import cache

import pytest
import torch
from monai.networks.nets import DiffusionModelUNet

from memory.predict.emulation import measure_peak
from memory.predict.prediction import GIB
from models import build_autoencoder, build_unet
from runtime.precision import cublas_bytes, move
from settings import Settings
from tests.models.autoencoders import settings_of

HIGH_RES = (256, 256, 64)


def laid_out(model):
    """Return the network in the layout that training chooses, in which convolutions need no workspace."""
    return move(model, torch.device("cpu"), "auto")


def autoencoder(implementation="lean", **training):
    training = {"use_gradient_checkpointing": True, **training}
    shape = {"num_channels": [16, 32, 64], "norm_num_groups": 8, "num_res_blocks": 2}
    return laid_out(build_autoencoder(settings_of(training, implementation=implementation, **shape)))


def bytes_without_cublas(tracker):
    """Return the peak on the device less what cuBLAS keeps: two workspaces, whatever the network and the grid."""
    cublas = sum(record.nbytes for record in tracker.alive_at_peak() if record.op == "cuBLAS")
    assert cublas <= 2 * cublas_bytes()
    return tracker.peak["device"] - cublas


@cache
def training_peak(grid, **knobs):
    """Peak bytes of forward and backward at batch 1, and the bytes kept on the host."""

    def step(tracker):
        model = autoencoder(**knobs)
        x = torch.zeros(1, 1, *grid)
        tracker.reset()
        with torch.autocast("cpu", torch.bfloat16):
            reconstruction, mean, sigma = model(x)
            loss = (reconstruction - x).abs().mean() + mean.mean() + sigma.mean()
        del reconstruction, mean, sigma
        loss.backward()

    tracker = measure_peak(step)
    return bytes_without_cublas(tracker), tracker.peak["host"]


STOCK = {"implementation": "monai", "use_gradient_checkpointing": False}


@pytest.mark.parametrize(
    ("knobs", "gib"),
    [
        ({"use_gradient_checkpointing": True}, 2.0),
        # Two full-resolution volumes of 32 channels and one of 16 are 640 MiB; the rest is what coarser blocks save.
        ({"use_gradient_checkpointing": True, "slab_rows": 16}, 0.87),
        ({"use_gradient_checkpointing_offload": True, "slab_rows": 16}, 0.83),
    ],
    ids=["checkpointing", "slabs", "slabs and offload"],
)
def test_training_pass_of_high_res_stays_below_its_bar(knobs, gib):
    device, host = training_peak(HIGH_RES, **knobs)
    assert device <= gib * GIB
    assert (host > GIB / 2) == ("use_gradient_checkpointing_offload" in knobs)
    stock = training_peak(HIGH_RES, **STOCK)[0]
    assert stock == pytest.approx(9.7 * GIB, rel=0.03), "as is known of it"
    assert device < stock / 4.5


def test_largest_grid_trains_in_14_gib():
    assert training_peak((512, 512, 256), use_gradient_checkpointing_offload=True, slab_rows=16)[0] <= 14 * GIB


@cache
def decoding_peak(autocast, **knobs):
    def decode(tracker):
        model = autoencoder(**knobs).eval()
        tracker.reset()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.decode(torch.zeros(1, 3, 64, 64, 16))

    return bytes_without_cublas(measure_peak(decode))


@pytest.mark.parametrize(
    ("autocast", "rows", "other"), [(True, 16, STOCK), (False, 16, STOCK), (False, 8, {})], ids=str
)
def test_decoding_in_slabs_needs_a_third_of_the_stock_decoder_and_of_our_own(autocast, rows, other):
    assert decoding_peak(autocast, slab_rows=rows) < decoding_peak(autocast, **other) / 3


def test_frozen_decoder_needs_no_more_than_training():
    def frozen(tracker):
        model = autoencoder(slab_rows=16).requires_grad_(False)
        latent = torch.zeros(1, 3, 64, 64, 16, requires_grad=True)
        tracker.reset()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.decode(latent).mean()
        loss.backward()

    training, _ = training_peak(HIGH_RES, use_gradient_checkpointing=True, slab_rows=16)
    assert bytes_without_cublas(measure_peak(frozen)) <= training


def unet_peak(build):
    def step(tracker):
        model = build()
        tracker.reset()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.zeros(1, 4, 128, 128, 128), torch.zeros(1)).mean()
        loss.backward()

    return bytes_without_cublas(measure_peak(step))


def test_unet_of_maisis_shape_trains_a_512_cube_in_12_gib():
    shape = {
        "num_channels": [64, 128, 256, 512],
        "attention_levels": [False, False, True, True],
        "num_head_channels": [0, 0, 32, 32],
        "resblock_updown": True,
    }
    settings = Settings.model_validate({"ldm": {"unet": shape, "training": {"use_gradient_checkpointing": True}}}).ldm
    ours = unet_peak(lambda: laid_out(build_unet(settings, latent_channels=4)))
    levels = (64, 128, 256, 512), (False, False, True, True)
    heads = {"num_head_channels": (0, 0, 32, 32), "use_flash_attention": True, "resblock_updown": True}
    stock = unet_peak(lambda: DiffusionModelUNet(3, 4, 4, 2, *levels, 32, **heads))
    assert ours <= 12 * GIB
    assert ours < 0.26 * stock
    assert stock > 36 * GIB
