"""The tracker sees every storage once, when it is made and when it is released, on fake tensors as on real ones."""

import pytest
import torch
from monai.networks.nets import AutoencoderKL
from torch import nn
from torch.utils.checkpoint import checkpoint

from memory.predict.emulation import emulated, measure_peak, tracked
from memory.predict.prediction import GIB
from models.lean.norm.operators import group_norm


def test_peak_counts_views_once_and_releases():
    def run(tracker):
        x = torch.zeros(1000)
        view = x[:500].reshape(5, 100)
        assert tracker.live["device"] == 4000
        y = view + 1
        assert tracker.live["device"] == 6000
        del x, y
        assert tracker.live["device"] == 4000
        del view
        assert tracker.live["device"] == 0

    for fake in (True, False):
        tracker = measure_peak(run, fake=fake)
        assert tracker.peak["device"] == 6000
        assert all(record.released for record in tracker.allocations)


def test_adopted_tensors_keep_their_category_and_gradients_get_theirs():
    def run(tracker):
        layer = nn.Linear(10, 10)
        tracker.adopt(layer.parameters(), "parameters")
        tracker.adopt_gradients(layer.parameters())
        layer(torch.zeros(1, 10)).sum().backward()
        layer.zero_grad(set_to_none=True)

    tracker = measure_peak(run)
    sizes: dict[str, int] = {}
    for record in tracker.allocations:
        sizes[record.category] = sizes.get(record.category, 0) + record.nbytes
    assert sizes["parameters"] == sizes["gradients"] == 440


def test_allocations_carry_the_module_in_forward_backward_and_recomputation():
    def run(tracker):
        network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        tracker.name_modules("net", network)
        hidden = network[0](torch.zeros(4, 8, requires_grad=True))
        checkpoint(network[1:], hidden, use_reentrant=False).sum().backward()

    tracker = measure_peak(run)
    gelus = [record for record in tracker.allocations if record.op == "gelu.default"]
    assert [record.module for record in gelus] == ["net.1", "net.1"]
    assert [record.in_backward for record in gelus] == [False, True]
    assert {record.module for record in tracker.allocations if record.op == "gelu_backward.default"} == {"net.1"}
    assert "net.0" in {record.module for record in tracker.allocations if record.in_backward}


def test_flops_are_split_into_forward_backward_and_recomputation():
    def run(tracker, checkpointed):
        convs = nn.Sequential(*(nn.Conv3d(4, 4, 3, padding=1) for _ in range(2)))
        x = torch.zeros(1, 4, 8, 8, 8, requires_grad=True)
        y = checkpoint(convs, x, use_reentrant=False) if checkpointed else convs(x)
        y.sum().backward()

    one = 2 * 4 * 4 * 27 * 8**3
    plain = measure_peak(lambda tracker: run(tracker, False)).flops
    assert plain == {"forward": 2 * one, "backward": 4 * one}
    # The last convolution is not computed again: backward needs its input only.
    again = measure_peak(lambda tracker: run(tracker, True)).flops
    assert again == {"forward": 2 * one, "backward": 4 * one, "recompute": one}


def stock_autoencoder(checkpoint, flash):
    return AutoencoderKL(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=(16, 32, 64),
        num_res_blocks=2,
        attention_levels=(False, False, True),
        latent_channels=3,
        norm_num_groups=8,
        use_checkpoint=checkpoint,
        use_flash_attention=flash,
    )


def small_step(fake):
    with emulated(fake, cuda=False) as mode:
        model = stock_autoencoder(checkpoint=True, flash=True)
        with tracked(mode, cuda=False) as tracker:
            tracker.adopt(model.parameters(), "parameters")
            x = torch.zeros(1, 1, 16, 16, 16)
            nn.functional.l1_loss(model(x)[0], x).backward()
    return tracker


def test_fake_step_makes_and_releases_the_storages_of_the_real_step(monkeypatch):
    # Under a dispatch mode autograd adds no gradients up in place, so a tracked real step makes new ones.
    monkeypatch.setattr("memory.predict.tracker.is_added_in_place", lambda *_: False)
    fake, real = small_step(True), small_step(False)
    assert [(r.op, r.nbytes) for r in fake.allocations] == [(r.op, r.nbytes) for r in real.allocations]
    assert fake.trace == real.trace
    assert fake.peak == real.peak


def test_gradients_of_a_tensor_with_two_uses_are_added_up_in_place():
    def run(tracker):
        x = torch.zeros(1000, requires_grad=True)
        y = x * 2
        (y * 3 + y * 5).backward(torch.zeros(1000))

    assert [r.op for r in measure_peak(run).allocations if r.in_backward and r.op == "add.Tensor"] == []


@pytest.mark.parametrize("channels_last", [False, True])
def test_remembered_results_change_nothing_but_the_time(monkeypatch, channels_last):
    def run(tracker):
        layers = nn.Sequential(nn.Conv3d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Upsample(scale_factor=2))
        x = torch.zeros(2, 2, 8, 8, 8)
        y = layers(x.to(memory_format=torch.channels_last_3d) if channels_last else x)
        parts = y.split(4, dim=2)
        torch.cat([part * 2 for part in parts], dim=2).add_(1).mean().backward()

    short = measure_peak(run)
    monkeypatch.setattr("memory.predict.known_results._how", lambda func: "asked")
    long = measure_peak(run)
    assert [(r.op, r.nbytes) for r in short.allocations] == [(r.op, r.nbytes) for r in long.allocations]
    assert short.trace == long.trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_convolutions_return_the_layout_of_a_gpu_whatever_the_cpu_can_do(dtype, layout):
    def run(tracker):
        x = torch.zeros(1, 8, 4, 4, 4, dtype=dtype).to(memory_format=layout).requires_grad_()
        weight = torch.zeros(4, 8, 3, 3, 3, dtype=dtype, requires_grad=True)
        for _ in range(2):  # the second time from memory
            y = nn.functional.conv3d(x, weight, padding=1)
            assert y.is_contiguous(memory_format=layout)
            gradient, _ = torch.autograd.grad(y, (x, weight), torch.zeros_like(y))
            assert gradient.is_contiguous(memory_format=layout)

    measure_peak(run)


def test_norms_on_a_gpu_without_triton_count_their_copies_in_fp32():
    voxels = 16 * 64**3  # more than a CPU converts at once

    def run(tracker):
        x = torch.zeros(1, 16, 64, 64, 64, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last_3d)
        weight, bias = torch.ones(16), torch.zeros(16)
        tracker.reset()
        group_norm(x, weight, bias, 4, 1e-5, True, torch.bfloat16)

    with_triton = measure_peak(run).peak["device"]
    without = measure_peak(run, without_triton=16 * GIB).peak["device"]
    # Its input and its result in 16 bits with Triton; a copy in fp32 besides without it.
    assert with_triton == pytest.approx(4 * voxels, rel=0.05)
    assert without == pytest.approx(8 * voxels, rel=0.05)


def test_of_two_backward_passes_parameters_keep_the_gradients_of_the_first():
    def run(tracker):
        layer = nn.Linear(64, 8)
        tracker.adopt_gradients(layer.parameters())
        for _ in range(2):
            layer(torch.zeros(4, 64)).square().sum().backward()

    tracker = measure_peak(run)
    kept = [tracker.allocations[index] for index in tracker.first_gradients.values()]
    assert sorted(record.nbytes for record in kept) == [8 * 4, 64 * 8 * 4]
    assert all(record.category == "gradients" for record in kept)
