"""The stage-1 step: accumulation is exact, the discriminator is left alone, and nothing moves on a bad value."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models.weight_files import save_weights
from settings import CheckpointError, Settings, TrainingError
from tests.training.steps import CPU, autoencoder_step, make_batches
from training import autoencoder_step as module
from training.autoencoder_step import AutoencoderStep

FLOAT16 = {"type": "cpu", "mixed_precision": True, "amp_dtype": "float16"}


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_non_finite_volume_stops_before_the_weights_move_and_names_term_step_and_file(tiny_values, optimizer):
    step = autoencoder_step(tiny_values, adversarial_start_step=0, optimizer=optimizer)
    assert len(step.updaters["autoencoder"].optimizers) == (2 if optimizer == "muon" else 1)
    step(make_batches(step, 2), 0)
    before = copy.deepcopy(step.state_dict())
    batches = make_batches(step, 2)
    batches[1].image[0, 0, 3, 3, 3] = float("nan")
    step(batches, 1)
    step(make_batches(step, 2), 2)  # good again, but the run is already lost: nothing may move
    torch.testing.assert_close(step.state_dict()["networks"], before["networks"], rtol=0, atol=0)
    torch.testing.assert_close(step.state_dict()["optimizers"], before["optimizers"], rtol=0, atol=0)
    said = r"step 2: reconstruction is not finite for volume 1\.nii; the weights were not updated and "
    with pytest.raises(TrainingError, match=said + r"the last checkpoint is good \(step 1\);"):
        step.guard.raise_if_bad(saved=1)
    with pytest.raises(TrainingError, match=said + "there is no checkpoint yet;"):
        step.guard.raise_if_bad()


def overflow(network: nn.Module | None) -> None:
    """Let a gradient of the network be infinite."""
    assert network is not None
    gradient = next(network.parameters()).grad
    assert gradient is not None
    gradient.fill_(float("inf"))


@pytest.mark.parametrize("is_float16", [False, True])
def test_a_discriminator_that_is_not_finite_keeps_both_networks_still(tiny_values, monkeypatch, is_float16):
    """In float16 an infinite gradient is an overflow, but an infinite loss is not."""
    what = "discriminator_real" if is_float16 else "discriminator gradient"
    if is_float16:
        tiny_values["device"] = FLOAT16
        true = module.adversarial_loss

        def infinite(logits, is_real):
            assert step.discriminator is not None
            is_discriminators = next(step.discriminator.parameters()).requires_grad
            return true(logits, is_real) + (float("inf") if is_real and is_discriminators else 0.0)

        monkeypatch.setattr(module, "adversarial_loss", infinite)
    step = autoencoder_step(tiny_values, adversarial_start_step=0)
    before = copy.deepcopy(step.state_dict())
    with torch.backends.mkldnn.flags(enabled=False):  # its 16-bit weight gradients read memory they never wrote
        step.backward(make_batches(step, 1, 1), 0)
    if not is_float16:
        overflow(step.discriminator)
    assert torch.isfinite(step.update(0)["autoencoder_gradient_norm"])
    torch.testing.assert_close(step.state_dict()["networks"], before["networks"], rtol=0, atol=0)
    with pytest.raises(TrainingError, match=f"{what} is not finite .* weights were not updated"):
        step.guard.raise_if_bad()


def test_float16_overflow_of_one_network_moves_the_other(tiny_values):
    tiny_values["device"] = FLOAT16
    step = autoencoder_step(tiny_values, adversarial_start_step=0)
    before = copy.deepcopy(step.state_dict()["networks"])
    with torch.backends.mkldnn.flags(enabled=False):
        step.backward(make_batches(step, 1, 1), 0)
    overflow(step.discriminator)
    step.update(0)
    after = step.state_dict()["networks"]
    torch.testing.assert_close(after["discriminator"], before["discriminator"], rtol=0, atol=0)
    assert any((after["autoencoder"][n] != before["autoencoder"][n]).any() for n in before["autoencoder"])
    step.guard.raise_if_bad()


def test_float16_overflow_skips_the_step_halves_the_scale_and_many_in_a_row_stop_the_run(tiny_values, monkeypatch):
    monkeypatch.setattr("training.guard.MAX_SKIPPED_STEPS", 3)
    tiny_values["device"] = FLOAT16
    step, resumed = (autoencoder_step(tiny_values, adversarial_weight=0.0) for _ in range(2))
    before = copy.deepcopy(step.state_dict()["networks"])
    for number in range(3):
        step.guard.raise_if_bad()
        with torch.backends.mkldnn.flags(enabled=False):  # its 16-bit weight gradients read memory they never wrote
            step.backward(make_batches(step, 1, 1), number)
        overflow(step.autoencoder)
        step.update(number)
    torch.testing.assert_close(step.state_dict()["networks"], before, rtol=0, atol=0)
    resumed.load_state_dict(copy.deepcopy(step.state_dict()))
    assert step.precision.scaler.get_scale() == resumed.precision.scaler.get_scale() == 2.0**13
    with pytest.raises(TrainingError, match="3 steps in a row overflowed in float16"):
        step.guard.raise_if_bad()


def test_every_trained_parameter_sits_in_exactly_one_optimizer(tiny_values):
    step = autoencoder_step(tiny_values, use_perceptual_loss=True, perceptual={"network": "structural"})
    wanted = [id(p) for network in step.networks.values() for p in network.parameters() if p.requires_grad]
    held = [id(p) for updater in step.updaters.values() for p in updater.parameters]
    assert sorted(held) == sorted(wanted)
    assert step.perceptual is not None
    assert not any(p.requires_grad for p in step.perceptual.parameters())


def test_training_starts_from_given_weights_and_refuses_those_of_another_network(tiny_values, tmp_path):
    source = autoencoder_step(tiny_values)
    with torch.no_grad():
        for network in source.networks.values():
            next(network.parameters()).fill_(0.125)
    for name, network in source.networks.items():
        save_weights(tmp_path / f"{name}.safetensors", network.state_dict(), {})
    tiny_values["autoencoder"]["pretrained"] = str(tmp_path / "autoencoder.safetensors")
    tiny_values["autoencoder"]["training"] |= {"ema_decay": 0.9}
    step = AutoencoderStep(Settings.model_validate(tiny_values), CPU)
    assert step.average is not None
    for name, average in step.average.state_dict().items():
        assert torch.equal(average, source.autoencoder.state_dict()[name]), f"the average of {name} starts elsewhere"
    for name, network in step.networks.items():
        torch.testing.assert_close(network.state_dict(), source.networks[name].state_dict(), rtol=0, atol=0)
    tiny_values["autoencoder"]["latent_channels"] = 5
    with pytest.raises(CheckpointError, match=r"autoencoder\.safetensors: does not fit .* of another shape"):
        AutoencoderStep(Settings.model_validate(tiny_values), CPU)
