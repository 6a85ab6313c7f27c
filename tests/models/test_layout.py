"""Networks in channels-last: the same gradients, the same noise, and no copy from one layout to the other in a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memory.predict.step import build_step
from models.lean.layout import CHANNELS_LAST, CONTIGUOUS, arranged, layout_of
from settings import validate
from tests.conftest import TINY
from tests.models.problems import ours


@pytest.mark.parametrize("shape", [(2, 1, 3, 4, 5), (1, 1, 1, 4, 1), (2, 3, 2, 1, 4), (2, 3, 1, 1, 1), (2, 1, 1, 1, 1)])
def test_volumes_are_arranged_without_changing_a_value(shape):
    x = torch.randn(shape)
    for layout in (CONTIGUOUS, CHANNELS_LAST):
        found = arranged(x, layout)
        assert torch.equal(found, x)
        assert x[0, 0].numel() == 1 or layout_of(found) == layout
        assert torch.equal(arranged(found, CONTIGUOUS), x)
        assert shape[1] > 1 or found.data_ptr() == x.data_ptr()


def test_setting_a_layout_keeps_weights_names_and_what_is_frozen():
    model: Any = ours("autoencoder", {})
    model.decoder.requires_grad_(False)
    before = [(name, p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()]
    model.set_layout(CHANNELS_LAST)
    for (name, value, is_trained), (new_name, p) in zip(before, model.named_parameters(), strict=True):
        assert (new_name, p.requires_grad) == (name, is_trained)
        assert torch.equal(p, value)
    volumes = [p for p in model.parameters() if p.dim() == 5 and p[0].numel() > 1]
    assert volumes
    assert all(p.is_contiguous(memory_format=CHANNELS_LAST) for p in volumes)


@pytest.mark.parametrize("implementation", ["lean", "monai"])
def test_noise_that_a_network_draws_itself_does_not_depend_on_the_layout(implementation):
    model: Any = ours("autoencoder", {"implementation": implementation})
    x = torch.randn(2, 2, 8, 4, 4)
    found = []
    for layout in (CONTIGUOUS, CHANNELS_LAST):
        model.set_layout(layout)
        torch.manual_seed(0)
        found.append(model(x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


KERNELS = {(1, 1, 1), (3, 3, 3), (4, 4, 4)}


class LayoutWatch(TorchDispatchMode):
    """Records operators that copy volumes into the other layout, or that must because their inputs are mixed."""

    # Elementwise operators read and write any layout in one pass; these are copies or make hidden ones.
    COPIES = ("aten::clone", "aten::_to_copy", "aten::copy_", "aten::contiguous")
    NEED_ONE = (
        *("aten::convolution", "lean::", "aten::cat", "aten::constant_pad_nd", "aten::upsample", "aten::avg_pool"),
        "aten::native_",
    )

    def __init__(self):
        super().__init__()
        self.mixed, self.convolutions = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name()
        volumes = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor) and is_volume(t)]
        self.convolutions += name.startswith("aten::convolution")
        if len({layout_of(t) for t in volumes}) > 1 and name.startswith((*self.COPIES, *self.NEED_ONE)):
            self.mixed.append((name, [tuple(t.shape) for t in volumes]))
        return out


def is_volume(tensor):
    """Return whether a tensor is a volume, not a convolution weight, an input or a latent.

    Inputs and latents are converted where they enter a network, and the gradient of the KL term arrives contiguous.
    """
    return tensor.dim() == 5 and tensor.shape[1] > 3 and tensor.shape[2:] not in KERNELS


@pytest.fixture
def two_threads():
    """Use two threads: on one, torch runs 1x1x1 convolutions in a kernel that knows one layout only."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


IN_SLABS = {"use_gradient_checkpointing": True, "slab_rows": 4}
STEPS = [
    ("autoencoder", {}, {}),
    ("autoencoder", IN_SLABS, {}),
    ("ldm", {}, {}),
    ("ldm", {}, {"resblock_updown": True}),
]


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
@pytest.mark.parametrize(("stage", "training", "unet"), STEPS, ids=str)
def test_no_volume_changes_its_layout_in_a_step_but_for_attention(two_threads, stage, training, unet, memory_format):
    values = copy.deepcopy(TINY)
    values["data"]["voxel_size"] = [16, 16, 24]  # no level is as small as a kernel
    values["device"]["memory_format"] = memory_format
    values["autoencoder"]["training"] |= training
    values["ldm"]["unet"] |= unet
    step = build_step(validate(values), stage)
    with LayoutWatch() as watch:
        step([step.example_batch(2)], 1)
    assert watch.convolutions > 10
    found = [name for name, _ in watch.mixed]
    if memory_format == "channels_last":
        assert not found
    else:
        # Attention works on tokens, whose channels lie side by side; its norm writes them, and takes their gradient.
        assert set(found) == {"lean::group_norm", "lean::group_norm_backward"}
        assert found.count("lean::group_norm_backward") == 4  # blocks with attention, in either stage
