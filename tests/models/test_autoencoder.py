"""What the lean autoencoder promises beside its gradients: keys, modes, frozen use, inference in slabs, log lines."""

import copy
import logging

import pytest
import torch
from monai.networks.nets import AutoencoderKL

from memory.predict.step import build_step
from models import LeanAutoencoder, StockAutoencoder, build_autoencoder, build_discriminator, build_unet
from models.lean import checkpointing, slabs
from settings import Settings, validate
from tests.models.autoencoders import settings_of, stock_like
from tests.support.tiny_config import TINY


def test_names_and_initial_weights_are_those_of_monai_in_its_order():
    settings = settings_of(attention_levels=[False, True, True])
    torch.manual_seed(3)
    lean = build_autoencoder(settings)
    torch.manual_seed(3)
    stock = stock_like(settings)
    assert isinstance(lean, AutoencoderKL)
    assert [name for name, _ in lean.named_parameters()] == [name for name, _ in stock.named_parameters()]
    assert list(lean.state_dict()) == list(stock.state_dict())
    assert all(map(torch.equal, lean.state_dict().values(), stock.state_dict().values()))


def test_implementation_monai_runs_the_stock_blocks_with_given_noise():
    model = build_autoencoder(settings_of({"use_gradient_checkpointing": True}, implementation="monai"))
    assert type(model) is StockAutoencoder
    assert model.use_checkpoint
    x = torch.randn(1, 1, 8, 8, 8)
    mean, sigma = model.encode(x)
    noise = torch.randn_like(mean)
    reconstruction, *_ = model(x, noise)
    torch.testing.assert_close(reconstruction, model.decode(mean + sigma * noise), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["lean", "monai"])
@pytest.mark.parametrize("blocks", [0, [2, 0, 2], [0, 0, 1]], ids=str)
def test_levels_without_residual_blocks_train(implementation, blocks):
    settings = settings_of(num_channels=[8, 16, 32], num_res_blocks=blocks, implementation=implementation)
    model = build_autoencoder(settings)
    reconstruction, mean, _ = model(torch.randn(1, 1, 8, 8, 8))
    assert reconstruction.shape == (1, 1, 8, 8, 8)
    assert mean.shape == (1, 3, 2, 2, 2)
    (reconstruction.sum() + mean.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture
def counted(monkeypatch):
    """A list with an entry for each block that went through a checkpoint."""
    calls, original = [], checkpointing._Checkpoint

    def checkpoint(*args, **kwargs):
        calls.append(kwargs["is_random"])
        return original(*args, **kwargs)

    monkeypatch.setattr(checkpointing, "_Checkpoint", checkpoint)
    return calls


def small_unet():
    unet = {"num_channels": [8, 16], "attention_levels": [False, True], "num_head_channels": 8, "norm_num_groups": 4}
    return build_unet(Settings.model_validate({"ldm": {"unet": unet}}).ldm, latent_channels=1)


@pytest.mark.parametrize(("build", "times"), [(lambda: build_autoencoder(settings_of()), ()), (small_unet, (5,))])
def test_checkpointing_acts_only_in_training_with_gradients(build, times, counted, caplog):
    model, x = build(), (torch.randn(1, 1, 8, 8, 8), *(torch.tensor([time]) for time in times))
    with caplog.at_level(logging.INFO, logger="models"):
        model.gradient_checkpointing_enable()
    with torch.no_grad():
        model(*x)
    model.eval()(*x)
    assert not counted
    model.train()(*x)
    assert f"gradient checkpointing on: {len(counted)} blocks" in caplog.text or not times
    assert len(counted) > 10
    assert not any(counted), "nothing in these blocks is random"
    model.gradient_checkpointing_disable()
    counted.clear()
    model(*x)
    assert not counted


def test_fewer_levels_checkpoint_fewer_blocks(counted):
    model, counts = build_autoencoder(settings_of()), []
    for levels in (1, 2, 3):
        counted.clear()
        model.gradient_checkpointing_enable(levels=levels)
        model(torch.randn(1, 1, 8, 8, 8))
        counts.append(len(counted))
    assert counts[0] < counts[1] < counts[2]
    with pytest.raises(AssertionError, match="allowed: all, or 1 to 3"):
        model.gradient_checkpointing_enable(levels=4)


def test_frozen_decoder_is_checkpointed(counted):
    model = build_autoencoder(settings_of({"use_gradient_checkpointing": True})).requires_grad_(False)
    model.decode(torch.randn(1, 3, 3, 2, 2, requires_grad=True))
    assert len(counted) > 5


def test_builder_applies_the_memory_knobs_of_the_settings():
    model = build_autoencoder(settings_of({"use_gradient_checkpointing": True, "slab_rows": 8, "checkpoint_levels": 2}))
    assert isinstance(model, LeanAutoencoder)
    assert model.nested, "auto nests with slabs"
    assert model.encoder.checkpointed_levels == model.decoder.checkpointed_levels == 2
    assert model.encoder.blocks[1].slab_rows == 8
    offloaded = build_autoencoder(settings_of({"use_gradient_checkpointing_offload": True, "slab_rows": 8}))
    assert isinstance(offloaded, LeanAutoencoder)
    assert offloaded.decoder.offload
    assert not offloaded.nested, "auto does not nest what is offloaded"


def test_inference_in_slabs_overwrites_nothing_that_was_given_to_it(monkeypatch):
    monkeypatch.setattr(slabs, "MIN_SLAB_VALUES", 0)
    lean = build_autoencoder(settings_of({"slab_rows": 4}))
    given = torch.randn(1, 1, 12, 8, 8), torch.randn(1, 3, 3, 2, 2), torch.randn(1, 8, 12, 8, 8)
    before = [tensor.clone() for tensor in given]
    with torch.no_grad():
        for run, tensor in zip((lean.encode, lean.decode, lean.encoder.blocks[1]), given, strict=True):
            run(tensor)
    assert all(map(torch.equal, given, before))


def test_a_copy_has_its_own_last_layers():
    model = build_autoencoder(settings_of({"slab_rows": 4}))
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data.zero_()
    x = torch.randn(1, 1, 8, 8, 8)
    assert twin(x)[0].abs().max() == 0
    assert model(x)[0].abs().max() > 0


def test_slabs_of_one_row_are_refused():
    with pytest.raises(AssertionError, match="at least 2"):
        build_autoencoder(settings_of()).set_slab_rows(1)


def test_a_constant_volume_has_finite_gradients_in_slabs():
    lean = build_autoencoder(settings_of({"slab_rows": 4}))
    reconstruction, mean, sigma = lean(torch.zeros(1, 1, 12, 8, 8), torch.zeros(1, 3, 3, 2, 2))
    (reconstruction.square().sum() + mean.sum() + sigma.sum()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in lean.parameters())


def test_discriminator_returns_features_and_ends_with_logits():
    features = build_discriminator(settings_of())(torch.randn(2, 1, 24, 24, 24))
    assert len(features) == 5
    assert features[-1].shape[:2] == (2, 1)
    norms = {type(module).__name__ for module in build_discriminator(settings_of()).modules()}
    assert "InstanceNorm" in norms
    assert not any("BatchNorm" in name for name in norms)


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_a_step_of_each_stage_trains(stage):
    values = copy.deepcopy(TINY)
    values["autoencoder"]["strides"] = [[2, 2, 1]] * (len(values["autoencoder"]["num_channels"]) - 1)
    values["ldm"]["training"]["pixel_loss"] = {"weight": 0.1}
    step = build_step(validate(values), stage)
    result = step([step.example_batch(2)], 1)
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in result.values())
