"""The checkpoint helper and its offload, on modules that are none of ours."""

from typing import Any

import pytest
import torch
from monai.networks.blocks import SpatialAttentionBlock
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from models import gradient_checkpoint_forward
from models.lean import checkpointing, native
from models.lean.attention import AttentionBlock
from models.lean.checkpointing import HostOffload, recomputed


class Toy(nn.Module):
    """Counts its own forwards; takes keyword arguments, as the guide's example does."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout, self.calls = nn.Linear(64, 64), nn.Dropout(dropout), 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return torch.sigmoid(self.dropout(self.linear(x))) * scale


def attention():
    return AttentionBlock(
        SpatialAttentionBlock(3, 16, num_head_channels=8, norm_num_groups=4, use_flash_attention=True)
    )


def gradients(module, x, checkpointing_on, offload, **kwargs):
    module.zero_grad()
    x = x.clone().requires_grad_()
    flags = {"use_gradient_checkpointing": checkpointing_on, "use_gradient_checkpointing_offload": offload}
    gradient_checkpoint_forward(module, x=x, **flags, **kwargs).square().sum().backward()
    return [x.grad, *(parameter.grad.clone() for parameter in module.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("on", "offload"), [(True, False), (False, True), (True, True)])
def test_checkpointed_gradients_equal_plain_ones_with_the_same_random_draws(on, offload, dropout):
    module, x = Toy(dropout), torch.randn(8, 64)
    torch.manual_seed(5)
    expected = gradients(module, x, False, False, scale=torch.tensor(2.0))
    assert module.calls == 1
    torch.manual_seed(5)
    found = gradients(module, x, on, offload, scale=torch.tensor(2.0))
    assert module.calls == 3, "forward runs twice"
    assert all(map(torch.equal, found, expected))


def test_helper_is_a_plain_call_in_eval_and_without_gradients():
    module, x = Toy(), torch.randn(8, 64, requires_grad=True)
    flags: dict[str, Any] = {"use_gradient_checkpointing": True, "use_gradient_checkpointing_offload": True}
    with torch.no_grad():
        assert not gradient_checkpoint_forward(module, x, **flags).requires_grad
    gradient_checkpoint_forward(module.eval(), x, **flags).sum().backward()
    assert module.calls == 2


def test_offload_moves_inputs_but_neither_parameters_nor_small_tensors(monkeypatch):
    moved = []
    original = checkpointing.empty_on_host

    def noted(tensor):
        moved.append(tuple(tensor.shape))
        return original(tensor)

    monkeypatch.setattr(checkpointing, "empty_on_host", noted)
    monkeypatch.setattr(checkpointing, "MIN_OFFLOAD_BYTES", 8 * 64 * 4)
    flags: dict[str, Any] = {"use_gradient_checkpointing": False, "use_gradient_checkpointing_offload": True}
    gradient_checkpoint_forward(Toy(), torch.randn(8, 64), torch.randn(64), **flags).sum().backward()
    assert moved == [(8, 64)]
    with HostOffload():
        loss = (torch.randn(8, 64, requires_grad=True) @ nn.Parameter(torch.randn(64, 64))).sum()
    loss.backward()
    assert moved == [(8, 64)], "parameters and leaves stay where they are"


def test_offload_releases_the_device_copy_before_backward(monkeypatch):
    monkeypatch.setattr(checkpointing, "MIN_OFFLOAD_BYTES", 0)
    alive = []
    offload = HostOffload()
    x = torch.randn(8, 64, requires_grad=True) * 1
    for _ in range(4):
        x = gradient_checkpoint_forward(
            nn.Tanh(), x, use_gradient_checkpointing=True, use_gradient_checkpointing_offload=offload
        )
        alive.append(StorageWeakRef(x.untyped_storage()))
    assert [ref.expired() for ref in alive] == [True, True, False, False], "one copy in flight, and the result"
    x.sum().backward()


def test_offload_survives_a_second_backward(monkeypatch):
    monkeypatch.setattr(checkpointing, "MIN_OFFLOAD_BYTES", 0)
    x = torch.randn(8, 64, requires_grad=True)
    with HostOffload():
        y = (x * 2).square().sum()
    y.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * first, rtol=0, atol=0)


@pytest.mark.parametrize("low", [False, True])
def test_a_recomputed_volume_is_released_and_has_the_same_gradients_in_the_same_precision(low):
    module, x = Toy(), torch.randn(8, 64, requires_grad=True)
    leaves, autocast = (x, *module.parameters()), torch.autocast("cpu", torch.bfloat16, enabled=low)
    with autocast:
        expected = torch.autograd.grad(module(x).square().sum(), leaves)
        volume = module(x)
        storage = StorageWeakRef(volume.untyped_storage())
        with recomputed(volume, module, x):
            loss = volume.square().sum()
    del volume
    assert storage.expired()
    loss.backward()
    assert module.calls == 3
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected), rtol=0, atol=0)


def test_nothing_is_left_of_attention_that_a_checkpoint_around_it_computed_again():
    block = attention()
    kept: list[StorageWeakRef] = []

    class Outer(nn.Module):
        def forward(self, x):
            y = gradient_checkpoint_forward(block, x, use_gradient_checkpointing=True)
            kept.append(StorageWeakRef(y.untyped_storage()))
            return gradient_checkpoint_forward(block, y, use_gradient_checkpointing=True).square()

    leaf = torch.randn(1, 16, 2, 3, 4, requires_grad=True)
    gradient_checkpoint_forward(Outer(), leaf, use_gradient_checkpointing=True).sum().backward()
    assert leaf.grad is not None
    assert len(kept) == 2
    assert all(storage.expired() for storage in kept), "a cycle of graph and kept tensors would keep them for ever"


class CountAttention(TorchDispatchMode):
    """Counts how often attention runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forwards += func in native.ATTENTION
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_around_attention_keeps_its_result_and_the_gradients(dtype, offload):
    torch.manual_seed(0)
    block, x = attention(), torch.randn(2, 16, 3, 4, 5)
    results: list[list[Any]] = []
    for on in (False, True):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        flags: dict[str, Any] = {"use_gradient_checkpointing": on, "use_gradient_checkpointing_offload": on and offload}
        with CountAttention() as counted:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                y = gradient_checkpoint_forward(block, leaf, **flags)
            y.float().square().sum().backward()
        assert counted.forwards == 1
        gradients: list[Any] = [parameter.grad for parameter in block.parameters()]
        results.append([y.detach(), leaf.grad, *(gradient.clone() for gradient in gradients)])
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)
