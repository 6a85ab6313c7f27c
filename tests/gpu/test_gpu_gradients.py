"""Gradients of every network on the GPU: in each precision and micro-batch as close to the truth as stock MONAI's."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.models.gradients import (
    BATCHES,
    DTYPES,
    LIMITS,
    LOW_PRECISION,
    Distances,
    Found,
    direction,
    distances,
    floor,
    small_work_counts,
    standing_out,
)
from tests.models.problems import KNOBS, ours, problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_arithmetic")]

CASES = [
    ("autoencoder", "lean"),
    ("autoencoder", "checkpointed"),
    ("autoencoder", "offloaded"),
    ("autoencoder", "slabs of 3"),
    ("autoencoder", "slabs of 4, nested, offloaded"),
    ("frozen decoder", "lean"),
    ("frozen decoder", "slabs of 3"),
    ("U-Net", "lean"),
    ("U-Net", "offloaded"),
    ("U-Net with classes", "checkpointed"),
    ("discriminator", "stock"),
]


def laid_out(values: Tensor, layout: str) -> Tensor:
    last = layout == "channels last" and values.dim() == 5
    return values.contiguous(memory_format=torch.channels_last_3d) if last else values.contiguous()


def on_gpu(network: nn.Module, name: str, batch: int, dtype: torch.dtype, layout: str) -> Found:
    """Run a network forward and backward as training does and return the results in double precision on the host."""
    given = problem(name, batch)
    low = dtype in LOW_PRECISION
    kind = torch.float32 if low else dtype
    network = network.to("cuda", kind)
    leaves = [
        laid_out(x.to("cuda", kind), layout).requires_grad_() if x.is_floating_point() else x.cuda()
        for x in given.inputs
    ]
    with small_work_counts():
        with torch.autocast("cuda", dtype if low else torch.bfloat16, enabled=low):
            outputs = list(given.run(network, *leaves))
        torch.autograd.backward(
            outputs, [laid_out(direction(out.shape).to("cuda", out.dtype), layout) for out in outputs]
        )
    found = {key: parameter.grad for key, parameter in network.named_parameters() if parameter.requires_grad}
    found |= {f"input {index}": leaf.grad for index, leaf in enumerate(leaves) if leaf.is_floating_point()}
    return Found(
        [out.detach().double().cpu() for out in outputs],
        {key: gradient.double().cpu() for key, gradient in found.items() if gradient is not None},
    )


@cache
def of_stock(name: str, batch: int, dtype: torch.dtype) -> Distances:
    """Return how far MONAI's network is from the truth on this GPU."""
    given = problem(name, batch)
    return distances(on_gpu(copy.deepcopy(given.stock), name, batch, dtype, "contiguous"), given.truth)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("name", "knob"), CASES)
def test_gradients_are_as_close_to_the_truth_as_stock(name, knob, dtype, batch):
    network = ours(name, KNOBS[name][knob])
    network.load_state_dict(problem(name, batch).stock.state_dict())
    stock = of_stock(name, batch, dtype)
    for layout in ("contiguous", "channels last"):
        found = distances(on_gpu(network, name, batch, dtype, layout), problem(name, batch).truth)
        apart = standing_out(found.each, stock, dtype)
        assert not apart, f"{layout}; times as far as stock: {apart}"
        ratio = found.total / max(stock.total, floor(dtype))
        assert ratio <= LIMITS[dtype], f"{layout}: {ratio:.2f} times as far from the truth as stock"
        network.zero_grad()
