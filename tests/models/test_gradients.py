"""Every network under every memory knob has MONAI's gradients, in every dtype and with several volumes at once."""

from typing import Any

import pytest
import torch

from models import LeanAutoencoder, build_autoencoder, build_discriminator
from settings.autoencoder import AutoencoderSettings, AutoencoderTraining
from settings.ldm import LdmTraining
from settings.section import SAME
from tests.models.autoencoders import plain_autoencoder, stock_like
from tests.models.gradients import (
    DTYPES,
    Found,
    Problem,
    channels_last,
    distances,
    run_backward,
    small_work_counts,
    standing_out,
)
from tests.models.problems import (
    AUTOENCODER_KNOBS,
    KNOBS,
    OTHERS,
    UNET_KNOBS,
    autoencoder_settings,
    cases,
    ours,
    problem,
    run_autoencoder,
    stock_discriminator,
    volumes,
    with_lively_weights,
)


@pytest.mark.parametrize(("network", "knob", "dtype", "batch"), list(cases()), ids=str)
def test_gradients_are_as_close_to_the_truth_as_those_of_stock(network, knob, dtype, batch):
    problem(network, batch).assert_as_close_as_stock(ours(network, KNOBS[network][knob]), dtype)


CHANNELS_LAST_KNOBS = {
    "autoencoder": ("lean", "slabs of 3", "thinnest slabs"),
    "interpolating autoencoder": ("lean", "slabs of 4, nested, offloaded"),
    "rows that stay": ("lean", "slabs of 3"),
    "frozen decoder": ("lean", "slabs of 3"),
    "U-Net with classes": ("lean", "checkpointed"),
    "U-Net with resblock_updown": ("checkpointed",),
    "discriminator": ("stock",),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("network", CHANNELS_LAST_KNOBS)
def test_channels_last_has_the_gradients_of_stock(network, dtype):
    # Two volumes, because torch convolves a single small one on the CPU by a kernel that knows one layout only.
    for knob in CHANNELS_LAST_KNOBS[network]:
        model: Any = ours(network, KNOBS[network][knob])
        model.set_layout(torch.channels_last_3d)
        problem(network, 2).assert_as_close_as_stock(model, dtype, arrange=channels_last)


@pytest.mark.parametrize("network", ["autoencoder", *OTHERS])
@pytest.mark.parametrize("rows", [2, 3, 7])
def test_inference_in_slabs_gives_the_volumes_of_a_plain_network(network, rows):
    plain, model = problem(network, 2), ours(network, {"slab_rows": rows}).eval().double()
    model.load_state_dict(plain.stock.state_dict())
    with small_work_counts(), torch.inference_mode():
        x, noise = (part.double() for part in plain.inputs)
        for mine, true in zip(run_autoencoder(model, x, noise), plain.truth.outputs, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-10)


def test_discriminator_with_its_kinks_has_the_gradients_of_stock_in_double_precision():
    torch.manual_seed(0)
    stock = with_lively_weights(stock_discriminator())
    with_kinks = Problem(stock, lambda network, x: network(x), [volumes(2, 2, 20, 16, 16)])
    with_kinks.assert_as_close_as_stock(build_discriminator(autoencoder_settings({})), torch.float64)


def test_every_knob_of_the_same_mathematics_is_among_them():
    # How volumes are put into micro-batches is a matter of the training loop, and batches of 1 to 4 are tried anyway.
    of_the_loop = {"batch_size", "gradient_accumulation_steps"}

    def knobs(section):
        fields = section.model_fields.items()
        return {name for name, field in fields if (field.json_schema_extra or {}).get("promise") == SAME} - of_the_loop

    tried = {name for knobs in AUTOENCODER_KNOBS.values() for name in knobs}
    assert knobs(AutoencoderTraining) | knobs(AutoencoderSettings) == tried
    assert knobs(LdmTraining) == {name for knobs in UNET_KNOBS.values() for name in knobs}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("network", ["autoencoder", "U-Net with classes"])
def test_one_wrong_gradient_among_many_is_noticed(network, dtype):
    truth, stock = problem(network, 2).truth, problem(network, 2).stock_distances(dtype)
    missed = set()
    for name, gradient in truth.gradients.items():
        wrong = Found(truth.outputs, {**truth.gradients, name: gradient.roll(1)})
        if name not in standing_out(distances(wrong, truth).each, stock, dtype):
            missed.add(name)
    # A key's bias shifts all scores of a query alike, so its true gradient is zero.
    assert all(name.endswith("to_k.bias") for name in missed), missed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "strides"), [((1, 2, 13, 9, 10), 2), ((3, 2, 7, 11, 6), 2), ((2, 2, 13, 9, 11), ((2, 2, 1), (2, 2, 2)))]
)
def test_encoder_has_the_gradients_of_stock_on_grids_that_no_level_divides(shape, strides, dtype):
    torch.manual_seed(0)
    levels = {"num_channels": [8, 16, 16], "attention_levels": [False, False, True]}
    shape_of_network = {**levels, "strides": strides}
    stock = with_lively_weights(plain_autoencoder(autoencoder_settings({}, **shape_of_network)))
    encoder = Problem(stock, lambda network, x: network.encode(x), [volumes(*shape)])
    for rows in (0, 2, 4):
        lean = build_autoencoder(autoencoder_settings({"slab_rows": rows}, **shape_of_network))
        encoder.assert_as_close_as_stock(lean, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"attention_levels": [False, True, True], "num_res_blocks": 2, "in_channels": 1},
        {"attention_levels": [False, False, False], "num_res_blocks": [0, 1, 2], "latent_channels": 2},
        {"num_channels": [12, 12], "attention_levels": [True, False], "num_res_blocks": [2, 0], "norm_num_groups": 3},
        {"num_channels": [8], "attention_levels": [False], "norm_num_groups": 8, "in_channels": 3},
        {"use_nonlocal_attention": False, "num_channels": [16, 8, 16], "norm_num_groups": 1},
    ],
    ids=["two attention levels", "no blocks on the first level", "no blocks on the last", "one level", "no middle"],
)
def test_autoencoders_of_other_shapes_have_the_gradients_of_stock(shape, dtype):
    torch.manual_seed(0)
    shape = {"num_channels": [8, 16, 16], "attention_levels": [False, False, True], **shape}
    chosen = autoencoder_settings({"slab_rows": 4, "use_gradient_checkpointing": True}, **shape)
    stock, x = with_lively_weights(stock_like(chosen)), volumes(2, chosen.in_channels, 12, 8, 8)
    noise = torch.randn_like(stock.encode(x)[0])
    Problem(stock, run_autoencoder, [x, noise]).assert_as_close_as_stock(build_autoencoder(chosen), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_knobs_that_only_recompute_change_no_bit(dtype):
    plain, model = problem("autoencoder", 2), ours("autoencoder", {})
    assert isinstance(model, LeanAutoencoder)
    model.load_state_dict(plain.stock.state_dict())
    expected = run_backward(model, plain.run, plain.inputs, dtype)
    for options in ({}, {"offload": True}, {"nested": True}, {"levels": 2}):
        model.gradient_checkpointing_enable(**options)
        with small_work_counts():
            found = run_backward(model, plain.run, plain.inputs, dtype)
        for name, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[name], gradient), (options, name)
