"""What the diffusion U-Net promises beside its gradients: when it checkpoints, and where its middle attends."""

import logging

import torch

from models import build_unet
from settings import Settings


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
