"""Networks of random shape under random mixtures of the memory knobs have the gradients of MONAI's."""

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from models import build_autoencoder, build_unet
from tests.models.autoencoders import stock_like
from tests.models.gradients import BATCHES, DTYPES, Problem
from tests.models.problems import (
    autoencoder_settings,
    ldm_settings,
    run_autoencoder,
    run_unet,
    stock_unet,
    unet_inputs,
    volumes,
    with_lively_weights,
)

# The same examples in every run, so that a failure comes from the code; no shrinking, because the networks are small.
examples = settings(
    phases=[Phase.generate],
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def shapes(draw):
    """Levels, channels in groups of one or many, and a grid that the levels divide, its quotients odd or even.

    The lowest level has at least 16 voxels: a norm over a handful of values magnifies any rounding at random.
    """
    levels, groups = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4, 8]))
    channels = [groups * draw(st.integers(8 // groups, 16 // groups)) for _ in range(levels)]
    attention = draw(st.lists(st.booleans(), min_size=levels, max_size=levels))
    grid = tuple(2 ** (levels - 1) * draw(st.sampled_from(lowest)) for lowest in ([4, 5, 6], [2, 3], [2, 3]))
    shape = {"num_channels": channels, "norm_num_groups": groups, "attention_levels": attention}
    return {**shape, "num_res_blocks": 1}, grid


@st.composite
def autoencoder_knobs(draw, levels):
    checkpointed, offloaded = draw(st.booleans()), draw(st.booleans())
    nested = draw(st.sampled_from(["auto", False, True] if checkpointed or offloaded else ["auto", False]))
    return {
        "use_gradient_checkpointing": checkpointed,
        "use_gradient_checkpointing_offload": offloaded,
        "use_nested_checkpointing": nested,
        "checkpoint_levels": draw(st.sampled_from(["all", *range(1, levels + 1)])),
        "slab_rows": draw(st.sampled_from([0, 2, 3, 4, 5, 7, 64])),
    }


conditions = st.fixed_dictionaries(
    {
        "batch": st.sampled_from(BATCHES),
        "cuda": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


@examples
@given(st.data(), shapes(), conditions, st.integers(1, 3), st.booleans())
def test_autoencoder_has_the_gradients_of_stock(data, shape, conditions, in_channels, middle):
    network, grid = shape
    network = {**network, "in_channels": in_channels, "use_nonlocal_attention": middle}
    knobs = data.draw(autoencoder_knobs(len(network["num_channels"])))
    torch.manual_seed(conditions["seed"])
    lean = autoencoder_settings(knobs, **network)
    stock, x = with_lively_weights(stock_like(lean)), volumes(conditions["batch"], in_channels, *grid)
    noise = torch.randn(conditions["batch"], 3, *lean.latent_grid(grid))
    problem = Problem(stock, run_autoencoder, [x, noise], conditions["cuda"])
    for dtype in DTYPES:
        problem.assert_as_close_as_stock(build_autoencoder(lean), dtype)


@examples
@given(shapes(), conditions, st.sampled_from([0, 2]), st.booleans(), st.booleans(), st.booleans())
def test_unet_has_the_gradients_of_stock(shape, conditions, classes, resblock_updown, checkpointed, offloaded):
    network, grid = shape
    network = {**network, "num_head_channels": network["num_channels"], "resblock_updown": resblock_updown}
    knobs = {"use_gradient_checkpointing": checkpointed, "use_gradient_checkpointing_offload": offloaded}
    torch.manual_seed(conditions["seed"])
    ours = ldm_settings(knobs, classes, **network)
    inputs = unet_inputs(conditions["batch"], grid, classes)
    problem = Problem(with_lively_weights(stock_unet(ours)), run_unet, inputs, conditions["cuda"])
    for dtype in DTYPES:
        problem.assert_as_close_as_stock(build_unet(ours, latent_channels=3), dtype)
