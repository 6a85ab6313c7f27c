"""What the diffusion U-Net promises beside its gradients: when it checkpoints, and where its middle attends."""

import itertools
import logging

import pytest
import torch
from monai.networks.nets import DiffusionModelUNet

from models import build_unet
from models.arguments import unet_arguments
from settings import ConfigError, Settings


def ldm_settings(**training):
    unet = {
        "num_channels": [8, 16, 16],
        "num_res_blocks": [1, 2, 1],
        "attention_levels": [False, True, True],
        "num_head_channels": [0, 8, 4],
        "norm_num_groups": 4,
    }
    return Settings.model_validate({"ldm": {"unet": unet, "training": training}}).ldm


def test_checkpointing_acts_only_in_training_with_gradients(monkeypatch, caplog):
    from models.lean import checkpointing

    calls = []
    original = checkpointing.checkpoint

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(checkpointing, "checkpoint", counted)
    with caplog.at_level(logging.INFO, logger="models"):
        model = build_unet(ldm_settings(use_gradient_checkpointing=True), latent_channels=3)
    (line,) = (record.getMessage() for record in caplog.records)
    x, t = torch.randn(1, 3, 8, 8, 8), torch.tensor([5])
    with torch.no_grad():
        model(x, t)
    model.eval()(x, t)
    assert not calls
    model.train()(x, t)
    assert f"{len(calls)} blocks of the diffusion U-Net" in line
    model.gradient_checkpointing_disable()
    calls.clear()
    model(x, t)
    assert not calls


def test_middle_attends_where_the_last_level_does_not():
    settings = ldm_settings()
    unet = settings.unet.model_copy(update={"attention_levels": (False, True, False), "num_head_channels": 8})
    model = build_unet(settings.model_copy(update={"unet": unet}), latent_channels=3)
    assert model.middle_block.attention.attn.num_heads == 2
    assert model(torch.randn(1, 3, 8, 8, 8), torch.tensor([5])).shape == (1, 3, 8, 8, 8)


@pytest.mark.parametrize("fold", [2, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_folded_network_is_monais_on_blocks_of_positions(fold, checkpointed):
    """Against slices with steps: output and gradients of weights and input in float64."""
    settings = ldm_settings(use_gradient_checkpointing=checkpointed)
    unet = settings.unet.model_copy(update={"fold": fold, "num_channels": (8, 16), "attention_levels": (False, True)})
    unet = unet.model_copy(update={"num_res_blocks": 1, "num_head_channels": 8})
    settings = settings.model_copy(update={"unet": unet})
    torch.manual_seed(0)
    model = build_unet(settings, latent_channels=2).double().train()
    stock = DiffusionModelUNet(**unet_arguments(settings, 2)).double().train()
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.2)
    stock.load_state_dict(model.state_dict())
    for batch in (1, 2, 3):
        size = [2 * fold, 4 * fold, 2 * fold]
        x = torch.randn(batch, 2, *size, dtype=torch.double, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        t, weight = torch.arange(batch) + 5, torch.randn(batch, 2, *size, dtype=torch.double)
        places = list(itertools.product(range(fold), repeat=3))
        parts = torch.stack([y[:, :, i::fold, j::fold, k::fold] for i, j, k in places], dim=2)
        found = stock(parts.flatten(1, 2), t).unflatten(1, (2, fold**3))
        wanted = torch.empty_like(y)
        for n, (i, j, k) in enumerate(places):
            wanted[:, :, i::fold, j::fold, k::fold] = found[:, :, n]
        torch.testing.assert_close(model(x, t), wanted, rtol=1e-12, atol=1e-12)
        ours = torch.autograd.grad((model(x, t) * weight).sum(), [x, *model.parameters()])
        theirs = torch.autograd.grad((wanted * weight).sum(), [y, *stock.parameters()])
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_folding_keeps_the_grids_of_all_levels_whole():
    unet = ldm_settings().unet.model_copy(update={"fold": 2})
    assert unet.downsampling == 8
    assert unet.level_grids((16, 24, 8)) == [(8, 12, 4), (4, 6, 2), (2, 3, 1)]
    assert unet.level_grids((9, 18, 8)) == unet.level_grids((16, 24, 8))
    settings = Settings.model_validate({"autoencoder": {"num_channels": [8, 16], "attention_levels": [False, False]}})
    changes = {"data.voxel_size": [32, 48, 48], "ldm.unet.fold": 2}
    assert settings.with_overrides(changes, "ldm").latent_shape[1:] == (16, 24, 24)
    with pytest.raises(ConfigError, match=r"3 levels and fold: 4 need latents divisible by 16.* a smaller fold"):
        settings.with_overrides({**changes, "ldm.unet.fold": 4}, "ldm")
