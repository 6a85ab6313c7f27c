"""Networks are moved only when they have to be, which lets fake ones stay."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.placement import move

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_network_moves_with_its_buffers():
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2))
    assert move(network, META) is network
    assert {tensor.device for tensor in (*network.parameters(), *network.buffers())} == {META}


def test_a_network_moves_when_only_a_buffer_is_elsewhere():
    network = nn.BatchNorm3d(2, affine=False)
    network.register_buffer("elsewhere", torch.zeros(1, device=META))
    move(network, META)
    assert {tensor.device for tensor in network.buffers()} == {META}


def test_a_fake_network_stays_where_it_is():
    with FakeTensorMode():
        network = nn.Linear(3, 3)
        weight = network.weight
        assert move(network, CPU).weight is weight
