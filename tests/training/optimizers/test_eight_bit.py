"""Adam in 8 bits: torch's update where it keeps float32, unbiased moments elsewhere, a quarter of the bytes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from memory.predict.step import build_step, track_step
from models import build_autoencoder, build_unet
from settings import Settings, load_settings
from tests.conftest import ROOT
from training.optimizers.eight_bit import _MEAN, _SQUARE, SMALLEST, EightBitAdam, block_of

RATE = 1e-2


def parameter_of(size: int | tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0)))


def gradient_of(parameter: nn.Parameter, number: int) -> torch.Tensor:
    """Return noise whose size differs from value to value."""
    generator = torch.Generator().manual_seed(number)
    sizes = torch.logspace(-3, 0, parameter.numel()).view(parameter.shape)
    return sizes * (1 + torch.randn(parameter.shape, generator=generator))


def run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, numbers: range) -> None:
    for number in numbers:
        parameter.grad = gradient_of(parameter, number)
        optimizer.step()


def test_small_parameters_are_updated_as_by_torch():
    ours, theirs = parameter_of(SMALLEST - 1), parameter_of(SMALLEST - 1)
    run(EightBitAdam([ours], RATE), ours, range(20))
    run(torch.optim.Adam([theirs], RATE, fused=True), theirs, range(20))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_moments_in_8_bits_follow_those_in_32_without_bias():
    ours, theirs = parameter_of(10260), parameter_of(10260)
    optimizer = EightBitAdam([ours], RATE)
    exact = torch.optim.Adam([theirs], RATE, fused=True)
    run(optimizer, ours, range(250))
    run(exact, theirs, range(250))
    states, expected = optimizer.state[ours], exact.state[theirs]
    square = _SQUARE.decode(states["square"], states["square_scale"]).flatten()
    ratio = square / expected["exp_avg_sq"]
    assert float(ratio.mean()) == pytest.approx(1, abs=0.02)
    assert float(ratio.std()) < 0.3
    mean = _MEAN.decode(states["mean"], states["mean_scale"]).flatten()
    assert (mean - expected["exp_avg"]).norm() < 0.05 * expected["exp_avg"].norm()
    moved = theirs - parameter_of(10260)
    assert (ours - theirs).norm() < 0.05 * moved.norm()


def test_the_two_moments_of_a_value_are_not_rounded_up_together():
    """Else the errors of an update, the mean divided by the root of the square, would depend on each other."""
    parameter = parameter_of(10260)
    optimizer = EightBitAdam([parameter], RATE)
    parameter.grad = 1 + torch.rand(10260, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    states = optimizer.state[parameter]
    mean = _MEAN.decode(states["mean"], states["mean_scale"]).flatten() / (0.1 * parameter.grad) - 1
    square = _SQUARE.decode(states["square"], states["square_scale"]).flatten() / (0.001 * parameter.grad.square()) - 1
    assert min(mean.std(), square.std()) > 1e-4
    assert torch.corrcoef(torch.stack([mean, square]))[0, 1] < 0.1


@pytest.mark.parametrize("share", [1e-2, 1e-4, 1e-6, 1e-8])
def test_values_with_small_gradients_beside_large_ones_do_not_jump(share):
    ours, theirs = parameter_of(SMALLEST), parameter_of(SMALLEST)
    optimizer = EightBitAdam([ours], RATE)
    exact = torch.optim.Adam([theirs], RATE, fused=True)
    sizes = torch.ones(SMALLEST)
    sizes[::2] = share
    largest = 0.0
    for number in range(60):
        before = ours.detach().clone()
        ours.grad = sizes * torch.randn(SMALLEST, generator=torch.Generator().manual_seed(number))
        theirs.grad = ours.grad.clone()
        optimizer.step()
        exact.step()
        largest = max(largest, float((ours.detach() - before).abs().max()))
    assert largest < 7.3 * RATE  # what Adam's moments can give at most
    assert (ours - theirs).abs().mean() < 8 * RATE  # in 60 updates


def test_a_second_moment_above_zero_stays_above_zero():
    values = torch.cat([torch.ones(1), torch.logspace(-30, -10, 254), torch.zeros(1)])[None]
    for dither in (0.0, 0.5, 1.0):
        codes, scale = _SQUARE.encode(values, torch.full_like(values, dither))
        assert torch.equal(_SQUARE.decode(codes, scale) > 0, values > 0)


def test_no_gradients_move_a_value_further_than_adam_would():
    # Growing like the quotient of the decays, they reach the bound of Cauchy and Schwarz.
    gradients = [(0.999 / 0.9) ** number for number in range(60)]
    ours, theirs = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    optimizer, exact = EightBitAdam([ours], RATE), torch.optim.Adam([theirs], RATE, fused=True)
    for gradient in gradients:
        ours.grad, theirs.grad = torch.full_like(ours, gradient), torch.full_like(theirs, gradient)
        optimizer.step()
        exact.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", [path.stem for path in sorted((ROOT / "configs").glob("*.yaml"))])
def test_states_need_at_most_three_tenths_of_float32(preset):
    settings = load_settings(ROOT / "configs" / f"{preset}.yaml")
    with torch.device("meta"):
        unet = build_unet(settings.ldm, settings.autoencoder.latent_channels)
        networks: list[nn.Module] = [build_autoencoder(settings.autoencoder), unet]
    for network in networks:
        optimizer = EightBitAdam(network.parameters(), RATE)
        states = [optimizer._begin(parameter) for parameter in network.parameters()]
        found = sum(value.nbytes for each in states for value in each.values())
        assert found <= 0.3 * 8 * sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((32, 16, 3, 3, 3), 27),
        ((32, 16, 4, 4, 4), 64),
        ((64, 64, 3, 3), 27),
        ((32, 64, 2, 2, 2), 32),
        ((64, 64), 27),
        ((5000,), 27),
        ((1, 4, 16, 16, 16), 27),
    ],
)
def test_each_kernel_has_a_scale_unless_it_is_small(shape, block):
    parameter = nn.Parameter(torch.zeros(shape))
    assert block_of(parameter) == block
    assert EightBitAdam([parameter], RATE)._begin(parameter)["mean"].shape == (
        -(-parameter.numel() // block),
        block,
    )


def test_large_gradients_of_one_kernel_do_not_disturb_another():
    shape = (8, 8, 3, 3, 3)
    ours, theirs = parameter_of(shape), parameter_of(shape)
    sizes = torch.logspace(-12, 0, 64).view(8, 8, 1, 1, 1)
    optimizer, exact = EightBitAdam([ours], RATE), torch.optim.Adam([theirs], RATE, fused=True)
    for number in range(30):
        gradient = sizes * (1 + torch.randn(shape, generator=torch.Generator().manual_seed(number)))
        ours.grad, theirs.grad = gradient, gradient.clone()
        optimizer.step()
        exact.step()
    moved = (theirs - parameter_of(shape)).flatten(2).norm(dim=2)
    # The smallest gradients are below Adam's epsilon.
    assert ((ours - theirs).flatten(2).norm(dim=2) < 0.05 * moved).all()


def test_states_of_another_block_size_are_continued_as_they_are():
    parameter, count = parameter_of((8, 8, 3, 3, 3)), 8 * 8 * 27
    optimizer = EightBitAdam([parameter], RATE)
    run(optimizer, parameter, range(2))
    state = optimizer.state_dict()
    for name, coding in (("mean", _MEAN), ("square", _SQUARE)):
        values = state["state"][0]
        moment = coding.decode(values[name], values[f"{name}_scale"]).flatten()
        moment = nn.functional.pad(moment, (0, -count % 256)).view(-1, 256)
        values[name], values[f"{name}_scale"] = coding.encode(moment, torch.full_like(moment, 0.5))
    optimizer.load_state_dict(state)
    run(optimizer, parameter, range(2, 5))
    assert optimizer.state[parameter]["mean"].shape == (7, 256)
    theirs = parameter_of((8, 8, 3, 3, 3))
    run(torch.optim.Adam([theirs], RATE, fused=True), theirs, range(5))
    assert (parameter - theirs).norm() < 0.1 * (theirs - parameter_of((8, 8, 3, 3, 3))).norm()


def test_a_blocked_update_changes_nothing():
    for size in (10, SMALLEST + 1):
        parameter = parameter_of(size)
        optimizer = EightBitAdam([parameter], RATE)
        run(optimizer, parameter, range(2))
        before = copy.deepcopy((parameter.detach(), dict(optimizer.state[parameter])))
        parameter.grad = torch.full_like(parameter, float("nan"))
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        torch.testing.assert_close((parameter.detach(), dict(optimizer.state[parameter])), before, rtol=0, atol=0)


def test_a_resumed_optimizer_continues_to_the_bit():
    parameter = parameter_of(SMALLEST + 7)
    optimizer = EightBitAdam([parameter], RATE)
    run(optimizer, parameter, range(3))
    file, resumed = io.BytesIO(), nn.Parameter(parameter.detach().clone())
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = EightBitAdam([resumed], RATE)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert {value.dtype for value in other.state[resumed].values()} == {
        *(torch.int8, torch.uint8, torch.int64, torch.float32)
    }
    run(optimizer, parameter, range(3, 6))
    run(other, resumed, range(3, 6))
    assert torch.equal(parameter, resumed)


def test_the_memory_layout_changes_nothing():
    shape = (16, 32, 3, 3, 3)
    contiguous = parameter_of(shape)
    channels_last = nn.Parameter(contiguous.detach().contiguous(memory_format=torch.channels_last_3d))
    for parameter in (contiguous, channels_last):
        run(EightBitAdam([parameter], RATE), parameter, range(3))
    assert not channels_last.is_contiguous()
    assert torch.equal(contiguous, channels_last)


def test_both_stages_have_it_and_the_real_step_is_what_is_predicted(tiny_values):
    tiny_values["device"]["optimizer_states"] = "8bit"
    tiny_values["autoencoder"]["training"]["adversarial_weight"] = 0.0
    tiny_values["autoencoder"].update(num_channels=[16, 16], num_res_blocks=0, attention_levels=[False, False])
    settings = Settings.model_validate(tiny_values)
    for stage in ("autoencoder", "ldm"):
        assert isinstance(build_step(settings, stage).updaters[stage].optimizer, EightBitAdam)
    predicted, real = (track_step(settings, "autoencoder", fake=fake, cuda=False) for fake in (True, False))
    assert predicted.peak["device"] == pytest.approx(real.peak["device"], rel=0.01)
