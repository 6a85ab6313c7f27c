"""The optimizer, learning rate, clipping and averaged weights against plain loops; noise of samples."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from runtime.precision import Precision
from runtime.processes import Process
from runtime.randomness import SampleNoise, derive_seed
from settings import DeviceSettings, TrainingError, TrainingSettings
from training.guard import Guard
from training.optimization import AveragedWeights, Updater, learning_rate_factor

CPU = torch.device("cpu")


@pytest.mark.parametrize(("warmup", "decay"), [(0, "none"), (7, "none"), (0, "cosine"), (7, "cosine"), (40, "cosine")])
def test_learning_rate_is_the_formula_at_every_step(warmup, decay):
    settings = TrainingSettings(max_steps=40, warmup_steps=warmup, learning_rate_decay=decay)
    for step in range(40):
        if step < warmup:
            expected = (step + 1) / warmup  # never 0, and whole at the last step of the warm-up
        elif decay == "none":
            expected = 1.0
        else:
            expected = math.cos(math.pi / 2 * (step - warmup) / (40 - warmup)) ** 2
        assert learning_rate_factor(step, settings) == pytest.approx(expected, rel=1e-12), step


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def gradients_of_step(network: nn.Module, step: int) -> list[torch.Tensor]:
    """Gradients of very different sizes, so that some steps are clipped and some are not."""
    generator = torch.Generator().manual_seed(step)
    size = 10.0 ** ((step % 3) - 1)
    return [size * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in network.parameters()]


def test_an_automatic_warm_up_takes_at_most_a_twentieth_of_the_time():
    """A run of minutes may have fewer steps than the warm-up of its max_steps."""
    settings = TrainingSettings(max_steps=20_000, max_hours=0.1, warmup_steps="auto", learning_rate_decay="cosine")
    assert [settings.model_copy(update={"max_steps": n}).num_warmup_steps for n in (4, 500, 50_000)] == [0, 25, 200]
    assert learning_rate_factor(0, settings, 0.0) == 1 / 200
    assert learning_rate_factor(3, settings, 0.025) == 0.5
    assert learning_rate_factor(9, settings, 0.05) == pytest.approx(0.994, abs=1e-3)
    assert learning_rate_factor(50, settings, 0.5) == pytest.approx(0.5)
    given = settings.model_copy(update={"warmup_steps": 200})
    assert learning_rate_factor(49, given, 0.5) == 0.25, "a number of steps is taken as it is"
    assert learning_rate_factor(99, given, 0.999) < 1e-5, "but the decay ends with the time"


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.5])
def test_updates_are_clipped_adam_at_the_schedules_rate(max_grad_norm):
    settings = TrainingSettings(max_steps=12, warmup_steps=3, learning_rate_decay="cosine", max_grad_norm=max_grad_norm)
    ours, plain = small_network(), small_network()
    adam = torch.optim.Adam(plain.parameters(), foreach=False)
    precision = Precision(DeviceSettings(type="cpu", mixed_precision=False), CPU)
    updater = Updater("network", ours, 1e-2, settings, precision)
    guard = Guard(Process(CPU), ["network gradient"], skips_overflows=False)
    norms = []
    for step in range(12):
        for network in (ours, plain):
            for parameter, gradient in zip(network.parameters(), gradients_of_step(network, step), strict=True):
                parameter.grad = gradient
        norm = updater.gradient_norm(guard)
        updater.update(step, norm, guard)
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm or math.inf).item())
        adam.param_groups[0]["lr"] = 1e-2 * learning_rate_factor(step, settings)
        adam.step()
        assert float(norm) == pytest.approx(norms[-1], rel=1e-6)
        assert all(p.grad is None for p in ours.parameters()), "gradients must not reach the next update"
    assert min(norms) < 1.5 < max(norms)
    for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_float16_gradients_are_clipped_at_their_true_size():
    """Until they are unscaled they hold a factor of 65536, which Adam would hide; its first moment does not."""
    settings = TrainingSettings(max_steps=10, max_grad_norm=1.5)
    precision = Precision(DeviceSettings(type="cpu", mixed_precision=True, amp_dtype="float16"), CPU)
    network = small_network().float()
    updater = Updater("network", network, 1e-2, settings, precision)
    guard = Guard(Process(CPU), ["network gradient"], skips_overflows=True)
    inputs, weights = torch.randn(5, 3), torch.full((5, 2), 4.0)
    loss = (network(inputs) * weights).sum()
    true = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
    precision.backward(loss)
    held = next(network.parameters()).grad
    assert held is not None
    assert held.norm() > 1e3 * true[0].norm()
    norm = updater.gradient_norm(guard)
    updater.update(0, norm, guard)
    expected = torch.stack([g.norm() for g in true]).norm()
    assert expected > 1.5
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for parameter, gradient in zip(network.parameters(), true, strict=True):
        moment = updater.optimizers[0].state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, 0.1 * gradient * 1.5 / expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_averaged_weights_are_the_moving_average_of_a_hand_loop(decay):
    network = small_network()
    average = AveragedWeights(network, decay)
    expected = [p.detach().clone() for p in network.parameters()]
    for step in range(200):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        average.update(step)
        kept = min(decay, (1 + step) / (10 + step))
        expected = [kept * e + (1 - kept) * p.detach() for e, p in zip(expected, network.parameters(), strict=True)]
    for name, value in zip(average.state_dict(), expected, strict=True):
        torch.testing.assert_close(average.state_dict()[name], value, rtol=1e-9, atol=1e-12)
    before = [p.detach().clone() for p in network.parameters()]
    with average.swapped_in():
        torch.testing.assert_close([p.detach() for p in network.parameters()], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close([p.detach() for p in network.parameters()], before, rtol=0, atol=0)
    restored = AveragedWeights(small_network(), decay)
    restored.load_state_dict(copy.deepcopy(average.state_dict()))
    torch.testing.assert_close(restored.state_dict(), average.state_dict(), rtol=0, atol=0)


def test_an_automatic_average_weighs_steps_by_a_power_and_its_mean_age_follows_the_run():
    """The weights of step t are t in one parameter and its square in another, so their averages are moments of t."""
    network = nn.Linear(2, 1, bias=False).double()
    average, length = AveragedWeights(network, "auto"), 0.05
    for step in range(2000):
        with torch.no_grad():
            network.weight.copy_(torch.tensor([[step + 1.0, (step + 1.0) ** 2]]))
        average.update(step)
        if step == 0:
            assert average.averages[0].tolist() == [[1.0, 1.0]]
        if step + 1 in (500, 2000):
            mean, square = (average.averages[0] / torch.tensor([[step + 1.0, (step + 1.0) ** 2]])).flatten().tolist()
            assert 1 - mean == pytest.approx(length, rel=0.02)
            # The moments of the density proportional to t^(1/length - 2) on [0, 1].
            power = 1 / length - 2
            assert square == pytest.approx((power + 1) / (power + 3), rel=0.01)


def test_noise_of_a_sample_does_not_depend_on_its_batch():
    noise = SampleNoise(seed=1, device=CPU)
    together = noise.normal("latent", (4, 5), (3, 2))
    alone = noise.normal("latent", (5,), (3, 2))
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=0)
    assert (noise.normal("other", (5,), (3, 2)) != alone).any()
    assert (noise.normal("latent", (4,), (3, 2)) != alone).any()
    assert (SampleNoise(seed=2, device=CPU).normal("latent", (5,), (3, 2)) != alone).any()
    assert len({derive_seed(s, p, k) for s in range(3) for p in ("latent", "other") for k in range(3)}) == 18
    many = noise.normal("latent", range(500), (4, 4))
    assert many.mean().abs() < 0.05
    assert many.std().item() == pytest.approx(1, abs=0.03)
    uniform = noise.uniform("timestep", range(200))
    assert 0 <= float(uniform.min()) < 0.05 < 0.95 < float(uniform.max()) < 1


@pytest.mark.parametrize("uses_muon", [False, True])
def test_states_saved_in_one_memory_layout_are_used_in_another(uses_muon):
    torch.manual_seed(0)
    precision, settings = Precision(DeviceSettings(mixed_precision=False), CPU), TrainingSettings(max_grad_norm=0)
    contiguous = nn.Conv3d(8, 9, 3)
    before = Updater("net", contiguous, 0.1, settings, precision, uses_muon=uses_muon)
    assert len(before.optimizers) == 1 + uses_muon
    guard = Guard(Process(CPU), ["net gradient"], skips_overflows=False)
    x = torch.randn(2, 8, 5, 5, 5)

    def update(network, updater, step):
        network(x).square().sum().backward()
        updater.update(step, updater.gradient_norm(guard), guard)

    update(contiguous, before, 0)
    other = copy.deepcopy(contiguous)
    other.weight = nn.Parameter(contiguous.weight.detach().clone(memory_format=torch.channels_last_3d))
    after = Updater("net", other, 0.1, settings, precision, uses_muon=uses_muon)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for network, updater in ((contiguous, before), (other, after)):
        update(network, updater, 1)
    torch.testing.assert_close(other.weight, contiguous.weight, rtol=1e-4, atol=1e-5)


def test_only_overflows_in_a_row_stop_the_run(monkeypatch):
    monkeypatch.setattr("training.guard.MAX_SKIPPED_STEPS", 2)
    guard = Guard(Process(CPU), ["network gradient"], skips_overflows=True)
    for step, norm in enumerate([math.inf, 1.0, math.inf, 1.0, math.inf, math.inf]):
        guard.raise_if_bad()
        guard.start(step)
        guard.check_gradient("network", torch.tensor(norm))
        guard.finish()
    with pytest.raises(TrainingError, match="2 steps in a row"):
        guard.raise_if_bad()
