"""Small networks of every kind and the knobs that must not change their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from monai.networks.nets import DiffusionModelUNet, PatchDiscriminator
from torch import Tensor, nn
from torch.nn import functional as F

from models import build_autoencoder, build_discriminator, build_unet
from settings import Settings
from tests.models.autoencoders import plain_autoencoder, settings_of, stock_like
from tests.models.gradients import BATCHES, DTYPES, Problem, same_in_every_dtype

CHECKPOINTED = {"use_gradient_checkpointing": True}
OFFLOADED = {"use_gradient_checkpointing_offload": True}
NESTED = {"use_nested_checkpointing": True}

AUTOENCODER_KNOBS: dict[str, dict[str, Any]] = {
    "lean": {},
    "checkpointed": CHECKPOINTED,
    "one level": {**CHECKPOINTED, "checkpoint_levels": 1},
    "nested": {**CHECKPOINTED, **NESTED},
    "offloaded": OFFLOADED,
    "nested and offloaded": {**OFFLOADED, **NESTED},
    "slabs of 3": {"slab_rows": 3},
    "thinnest slabs": {**CHECKPOINTED, "slab_rows": 2},
    "one slab": {**CHECKPOINTED, "slab_rows": 64, "checkpoint_levels": 1},
    "slabs of 5, offloaded": {**OFFLOADED, "slab_rows": 5},
    "slabs of 4, nested, offloaded": {**OFFLOADED, **NESTED, "slab_rows": 4},
    "first level on the host": {"offload_levels": 1, "slab_rows": 4},
    "first level on the host, nested": {**CHECKPOINTED, **NESTED, "offload_levels": 1, "slab_rows": 3},
    "MONAI's blocks": {"implementation": "monai"},
    "MONAI's blocks, checkpointed": {"implementation": "monai", **CHECKPOINTED},
}
DECODER = ("lean", "checkpointed", "offloaded", "slabs of 3", "first level on the host")
UNET_KNOBS = {"lean": {}, "checkpointed": CHECKPOINTED, "offloaded": OFFLOADED}
LEAN_KNOBS = {name: knobs for name, knobs in AUTOENCODER_KNOBS.items() if "implementation" not in knobs}
FEW = ("lean", "stock", "slabs of 3", "slabs of 4, nested, offloaded")
KNOBS: dict[str, dict[str, dict[str, Any]]] = {
    "autoencoder": AUTOENCODER_KNOBS,
    "interpolating autoencoder": LEAN_KNOBS,
    "thick slices": LEAN_KNOBS,
    "rows that stay": LEAN_KNOBS,
    "frozen decoder": {name: AUTOENCODER_KNOBS[name] for name in DECODER},
    "U-Net": UNET_KNOBS,
    "U-Net with classes": UNET_KNOBS,
    "U-Net with resblock_updown": {"lean": {}, "checkpointed": CHECKPOINTED},
    "discriminator": {"stock": {}},
}

AUTOENCODER = {"in_channels": 2, "num_channels": [8, 16], "attention_levels": [False, True], "norm_num_groups": 4}
THREE_LEVELS = {"num_channels": [8, 8, 16], "attention_levels": [False, False, True]}
# Other shapes of the autoencoder, their volumes and micro-batches: MAISI's decoder; thick slices along the last axis;
# slabs cut along an axis that the first level does not shrink, odd at the end.
OTHERS: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, ...]]] = {
    "interpolating autoencoder": ({**THREE_LEVELS, "variant": "maisi"}, (12, 8, 4), BATCHES),
    "thick slices": ({**THREE_LEVELS, "strides": ((2, 2, 1), (2, 2, 2))}, (8, 8, 10), (1, 3)),
    "rows that stay": ({**THREE_LEVELS, "strides": ((1, 2, 2), (2, 2, 1))}, (10, 8, 6), (2, 4)),
}
UNET = {
    "num_channels": [8, 16],
    "num_res_blocks": 1,
    "attention_levels": [False, True],
    "num_head_channels": 8,
    "norm_num_groups": 4,
}
CLASSES = 2
Network = TypeVar("Network", bound=nn.Module)


def autoencoder_settings(knobs: dict[str, Any], **shape: Any) -> Any:
    training = {key: value for key, value in knobs.items() if key != "implementation"}
    training = {"discriminator": {"num_layers_d": 2, "num_channels": 16}, **training}
    implementation = knobs.get("implementation", "lean")
    return settings_of(training, **{**AUTOENCODER, "implementation": implementation, **shape})


def unet_settings(network: str, knobs: dict[str, Any]) -> Any:
    conditioning = {"type": "class", "num_classes": CLASSES} if "classes" in network else {"type": "none"}
    unet = {**UNET, "resblock_updown": "updown" in network}
    return Settings.model_validate({"ldm": {"unet": unet, "conditioning": conditioning, "training": knobs}}).ldm


def ours(network: str, knobs: dict[str, Any]) -> nn.Module:
    """The project's network, frozen where only its input is to have a gradient."""
    if network in ("autoencoder", "frozen decoder"):
        return build_autoencoder(autoencoder_settings(knobs)).requires_grad_(network == "autoencoder")
    if network in OTHERS:
        model = build_autoencoder(autoencoder_settings(knobs, **OTHERS[network][0]))
        model.value_range = "symmetric"  # as that of the plain network
        return model
    if network == "discriminator":
        return without_kinks(build_discriminator(autoencoder_settings(knobs)))
    return build_unet(unet_settings(network, knobs), latent_channels=3)


def stock_unet(settings: Any) -> DiffusionModelUNet:
    """MONAI's own class, built without any of our code; one class more than the data have stands for a hidden label."""
    unet, classes = settings.unet, settings.conditioning.num_classes
    network = DiffusionModelUNet(
        3, 3, 3, unet.res_blocks, unet.num_channels, unet.attention_levels, unet.num_groups,
        num_head_channels=unet.head_channels, num_class_embeds=classes + 1 if classes else None,
        use_flash_attention=True, resblock_updown=unet.resblock_updown,
    )  # fmt: skip
    return pooling_in_low_precision(network)


class PoolInLowPrecision(nn.Module):
    """Average pooling in 16 bits, which torch has on GPUs only: summed in fp32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool3d(x.to(torch.promote_types(x.dtype, torch.float32)), 2).to(x.dtype)


def pooling_in_low_precision(network: Network) -> Network:
    for module in list(network.modules()):
        if isinstance(getattr(module, "op", None), nn.AvgPool3d):
            module.op = PoolInLowPrecision()
    return network


def stock_discriminator() -> PatchDiscriminator:
    return PatchDiscriminator(3, channels=16, in_channels=2, out_channels=1, num_layers_d=2, norm="INSTANCE")


def without_kinks(network: Network) -> Network:
    """Replace LeakyReLU by SiLU, because rounding a value across the kink changes a gradient by far more than rounding.

    With a kink, whether stock or ours is closer to the truth depends on which of them happens to cross it.
    """
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.LeakyReLU):
                setattr(module, name, nn.SiLU())
    return network


def with_lively_weights(network: Network) -> Network:
    """Move weights away from special values: norms start at one and zero, and some of MONAI's convolutions at zero.

    Biases of this size give the groups of a norm means and scales of their own.
    """
    for parameter in network.parameters():
        parameter.data += (0.3 if parameter.dim() == 1 else 0.05) * torch.randn_like(parameter)
    return network


def volumes(batch: int, channels: int, *grid: int) -> Tensor:
    """Volumes of which each, and each channel, has a mean and a scale of its own."""
    count = batch * channels
    values = torch.logspace(-1, 1, count), torch.linspace(-3, 3, count)[torch.randperm(count)]
    scale, mean = (each.view(batch, channels, 1, 1, 1) for each in values)
    return same_in_every_dtype(torch.randn(batch, channels, *grid) * scale + mean)


def run_autoencoder(network: Any, x: Tensor, noise: Tensor) -> list[Tensor]:
    mean, sigma = network.encode(x)
    return [network.decode(mean + sigma * noise), mean, sigma]


def run_unet(network: Any, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> list[Tensor]:
    return [network(x, timesteps, class_labels=labels)]


@cache
def problem(network: str, batch: int) -> Problem:
    """The weights and inputs of one kind of network; shared, because MONAI's gradients are the same for all knobs.

    Three volumes of an autoencoder or a U-Net are computed by the autocast rules of a CPU, others by those of a GPU.
    """
    torch.manual_seed(batch)
    cuda = batch != 3
    if network == "discriminator":
        stock: nn.Module = without_kinks(with_lively_weights(stock_discriminator()))
        return Problem(stock, lambda network, x: network(x), [volumes(batch, 2, 20, 16, 16)])
    if network.startswith("U-Net"):
        stock = with_lively_weights(stock_unet(unet_settings(network, {})))
        labels = [torch.arange(batch) % (CLASSES + 1)] if "classes" in network else []
        inputs = [volumes(batch, 3, 6, 4, 10), torch.linspace(10, 900, batch).long(), *labels]
        return Problem(stock, run_unet, inputs, cuda)
    if network in OTHERS:
        shape, grid, _ = OTHERS[network]
        settings = autoencoder_settings({}, **shape)
        plain = with_lively_weights(plain_autoencoder(settings))
        noise = torch.randn(batch, 3, *settings.latent_grid(grid))
        return Problem(plain, run_autoencoder, [volumes(batch, 2, *grid), noise], cuda)
    stock = with_lively_weights(stock_like(autoencoder_settings({})))
    if network == "frozen decoder":
        stock.requires_grad_(False)
        return Problem(stock, lambda network, latent: [network.decode(latent)], [volumes(batch, 3, 6, 2, 3)])
    return Problem(stock, run_autoencoder, [volumes(batch, 2, 12, 4, 6), torch.randn(batch, 3, 6, 2, 3)], cuda)


def cases() -> Iterator[tuple[str, str, torch.dtype, int]]:
    """Every network: with a few knobs in each dtype and micro-batch, with each of the others in every one of them once.

    Most knobs of other shapes are tried in double precision only.
    """
    for network, knobs in KNOBS.items():
        batches = OTHERS[network][2] if network in OTHERS else BATCHES
        for number, knob in enumerate(knobs):
            if knob in FEW:
                yield from itertools.product([network], [knob], DTYPES, batches)
            elif network in OTHERS:
                yield network, knob, torch.float64, batches[1]
            else:
                yield from ((network, knob, dtype, BATCHES[(number + at) % 4]) for at, dtype in enumerate(DTYPES))
