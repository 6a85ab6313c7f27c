"""Networks are moved only when they have to be, which lets fake ones stay, and laid out as the settings say."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import build_autoencoder
from runtime.placement import move
from runtime.precision import Precision
from settings import DeviceSettings, validate

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_network_moves_with_its_buffers():
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2))
    assert move(network, META) is network
    assert {tensor.device for tensor in (*network.parameters(), *network.buffers())} == {META}


def test_a_fake_network_stays_where_it_is():
    with FakeTensorMode():
        network = nn.Linear(3, 3)
        weight = network.weight
        assert move(network, CPU).weight is weight


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("implementation", ["lean", "monai"])
@pytest.mark.parametrize("memory_format", ["auto", "contiguous", "channels_last"])
def test_a_network_gets_the_memory_format_of_the_settings(memory_format, implementation, fake):
    shape = {"num_channels": [8], "norm_num_groups": 4, "attention_levels": [False], "implementation": implementation}
    with FakeTensorMode() if fake else nullcontext():
        network = move(build_autoencoder(validate({"autoencoder": shape}).autoencoder), CPU, memory_format)
        weight = network.encoder.blocks[1].conv1.conv.weight
    last = memory_format == "channels_last" or (memory_format == "auto" and implementation == "lean")
    assert weight.is_contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)


def test_cuda_uses_tf32_and_its_fastest_algorithms():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    try:
        Precision(DeviceSettings(), CPU)
        assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == (True, True, True)
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
