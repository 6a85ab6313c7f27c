"""Every rung changes the step, and its name says how."""

from itertools import pairwise
from typing import Any

import pytest

from memory.ladder.rungs import Order, build_rungs
from memory.predict.prediction import Stage
from tests.memory.ladder.test_walk import TRAINING, heavy

NETWORKS = [None, "lpips-squeeze", "lpips-alex", "lpips-vgg", "medicalnet-resnet10", "structural"]
ORDERS: tuple[Order, Order] = ("lossless-first", "guide")
STAGES: tuple[Stage, Stage] = ("autoencoder", "ldm")


@pytest.mark.parametrize("network", NETWORKS)
def test_slices_one_at_a_time_are_offered_where_a_network_sees_slices(network):
    perceptual = {f"{TRAINING}.perceptual.network": network} if network else {}
    settings = heavy(**{f"{TRAINING}.use_perceptual_loss": network is not None, **perceptual})
    for stage in STAGES:
        names = {order: [rung.name for rung in build_rungs(settings, stage, order)] for order in ORDERS}
        offered = [order for order in ORDERS if "perceptual loss one slice at a time" in names[order]]
        has_slices = stage == "autoencoder" and (network or "").startswith("lpips-")
        assert offered == (["lossless-first"] if has_slices else [])


NO_EFFECT: dict[str, tuple[Stage, dict[str, Any], set[str]]] = {
    "nested is what auto means with slabs": (
        "autoencoder",
        {f"{TRAINING}.use_gradient_checkpointing": True, f"{TRAINING}.slab_rows": 8},
        {f"{TRAINING}.use_nested_checkpointing"},
    ),
    "offload already checkpoints": (
        "autoencoder",
        {f"{TRAINING}.use_gradient_checkpointing_offload": True},
        {f"{TRAINING}.use_gradient_checkpointing"},
    ),
    "one volume cannot be decoded in smaller chunks": (
        "ldm",
        {"ldm.training.pixel_loss.weight": 0.1, "ldm.training.batch_size": 1, "ldm.training.pixel_loss.chunk_size": 4},
        {"ldm.training.pixel_loss.chunk_size"},
    ),
    "the decoder of the pixel loss is always checkpointed": (
        "ldm",
        {"ldm.training.pixel_loss.weight": 0.1},
        {f"{TRAINING}.use_gradient_checkpointing"},
    ),
    "stage 2 sees whole volumes": ("ldm", {"data.patch_size": (64, 64, 64)}, {"data.patch_size"}),
}


@pytest.mark.parametrize("case", NO_EFFECT)
def test_a_change_without_effect_is_not_a_rung(case):
    stage, given, keys = NO_EFFECT[case]
    settings = heavy(**{"autoencoder.implementation": "lean", **given})
    for rungs in (build_rungs(settings, stage, "lossless-first"), build_rungs(settings, stage, "guide")):
        for rung in rungs[1:]:
            assert set(rung.changes) != keys, rung.name


def test_smaller_is_never_larger():
    changes = {
        "autoencoder.num_channels": (4, 8, 8),
        "autoencoder.norm_num_groups": 4,
        f"{TRAINING}.discriminator.num_layers_d": 1,
        f"{TRAINING}.discriminator.num_channels": 4,
    }
    for above, rung in pairwise(build_rungs(heavy(**changes), "autoencoder", "guide")):
        before, after = above.settings.autoencoder, rung.settings.autoencoder
        assert all(new <= old for new, old in zip(after.num_channels, before.num_channels, strict=True)), rung.name
        assert after.training.discriminator.num_layers_d <= before.training.discriminator.num_layers_d
        assert after.training.discriminator.num_channels <= before.training.discriminator.num_channels


@pytest.mark.parametrize("where", ["ldm", "autoencoder"])
def test_no_attention_is_claimed_only_when_none_is_left(where):
    """The U-Net's middle attends whatever its levels do, and the autoencoder's when it was asked to."""
    settings = heavy(**{"autoencoder.use_nonlocal_attention": True})
    names = [rung.name for rung in build_rungs(settings, where, "lossless-first")]
    assert "no attention" not in names
    assert "no attention at level 2" in names


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_cpu_has_no_host_to_offload_to(stage, order):
    def names(device: str) -> str:
        return ", ".join(rung.name for rung in build_rungs(heavy(**{"device.type": device}), stage, order))

    for word in ("offload" if stage == "autoencoder" else "on the host", "mixed precision"):
        assert word in names("cuda")
        assert word not in names("cpu")
