"""Muon against singular value decompositions and arithmetic by hand, and what it leaves to Adam."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memory.kernels.operators import is_kernel
from models import build_autoencoder
from runtime.precision import Precision
from settings import AutoencoderSettings, DeviceSettings, TrainingSettings
from training import muon
from training.muon import Muon, orthogonal
from training.optimization import Updater


@pytest.mark.parametrize("shape", [(3, 8, 40), (2, 40, 8)])
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_orthogonal_matrices_keep_their_singular_vectors_and_lose_their_values(shape, size):
    torch.manual_seed(0)
    matrices = size * torch.randn(shape)
    left, _, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    inside = left.mT @ orthogonal(matrices).double() @ right.mT
    values = inside.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(inside, torch.diag_embed(values), rtol=0, atol=1e-4)  # fp32, five rounds
    assert 0.65 < values.min() < values.max() < 1.25, "where the five rounds of the polynomial take them"


@pytest.mark.parametrize("stacked", [muon.STACKED_VALUES, 2 * 2160])
def test_updates_are_orthogonal_momentum_in_steps_of_adams_size(stacked, monkeypatch):
    monkeypatch.setattr(muon, "STACKED_VALUES", stacked)
    torch.manual_seed(0)
    kernels = [nn.Parameter(torch.randn(8, 10, 3, 3, 3)) for _ in range(3)]
    expected = [kernel.detach().clone() for kernel in kernels]
    momenta = [torch.zeros_like(kernel) for kernel in expected]
    optimizer = Muon(kernels, lr=0.01)
    for step in range(3):
        for kernel, by_hand, momentum in zip(kernels, expected, momenta, strict=True):
            kernel.grad = torch.randn(kernel.shape, generator=torch.Generator().manual_seed(step))
            momentum.mul_(0.95).add_(0.05 * kernel.grad)
            direction = 0.05 * kernel.grad + 0.95 * momentum
            by_hand -= 0.01 * 0.2 * math.sqrt(270) * orthogonal(direction.flatten(1)[None])[0].view(kernel.shape)
        optimizer.step()
    for kernel, by_hand in zip(kernels, expected, strict=True):
        # The columns are summed in another order.
        torch.testing.assert_close(kernel.detach(), by_hand, rtol=1e-4, atol=1e-5)


def test_a_blocked_update_leaves_kernels_and_momentum_alone():
    kernel = nn.Parameter(torch.randn(8, 8, 3, 3, 3))
    optimizer = Muon([kernel], lr=0.1)
    kernel.grad = torch.randn_like(kernel)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    before, momentum = kernel.detach().clone(), optimizer.state[kernel]["momentum"].clone()
    assert momentum.any()
    optimizer.found_inf, kernel.grad = torch.ones(()), torch.full_like(kernel, math.nan)
    optimizer.step()
    assert torch.equal(kernel, before)
    assert torch.equal(optimizer.state[kernel]["momentum"], momentum)


class Launches(TorchDispatchMode):
    """Counts operators that a GPU would start a kernel for."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += is_kernel(func)
        return func(*args, **(kwargs or {}))


def test_kernels_of_one_shape_take_as_many_launches_as_one():
    found = []
    for number in (1, 5):
        values = [torch.randn(8, 10, 3, 3, 3).contiguous(memory_format=torch.channels_last_3d) for _ in range(number)]
        optimizer = Muon([nn.Parameter(value) for value in values], lr=0.1)
        optimizer.found_inf = torch.zeros(())
        for kernel in optimizer.param_groups[0]["params"]:
            kernel.grad = torch.ones_like(kernel)
        optimizer.step()  # makes the momenta
        with Launches() as seen:
            optimizer.step()
        found.append(seen.number)
    assert found[0] == found[1] > 0


def test_kernels_between_layers_of_many_channels_are_muons_and_the_rest_is_adams():
    settings = AutoencoderSettings(num_channels=(8, 16), num_res_blocks=1, attention_levels=(False, True))
    network = build_autoencoder(settings)
    precision = Precision(DeviceSettings(mixed_precision=False), torch.device("cpu"))
    updater = Updater("autoencoder", network, 0.1, TrainingSettings(), precision, uses_muon=True)
    others, kernels = ([p for group in o.param_groups for p in group["params"]] for o in updater.optimizers)
    assert {id(p) for p in others} | {id(p) for p in kernels} == {id(p) for p in network.parameters()}
    assert len(others) + len(kernels) == len(list(network.parameters()))
    names = {name for name, p in network.named_parameters() if any(p is kernel for kernel in kernels)}
    assert {"encoder.blocks.1.conv1.conv.weight", "decoder.blocks.1.conv2.conv.weight"} <= names
    assert all(name.endswith("conv.weight") for name in names)
    # The ends of both halves have 1 and 3 channels, and shortcuts and the latent's convolutions have one tap.
    assert not names & {"encoder.blocks.0.conv.weight", "decoder.blocks.0.conv.weight", "quant_conv_mu.conv.weight"}
    assert not any("nin_shortcut" in name for name in names)
