"""The diffusion U-Net equals MONAI's, with and without checkpointing."""

import logging

import pytest
import torch
from monai.networks.nets import DiffusionModelUNet

from models import build_unet
from settings import Settings


def ldm_settings(conditioning=None, resblock_updown=False, **training):
    unet = {
        "resblock_updown": resblock_updown,
        "num_channels": [8, 16, 16],
        "num_res_blocks": [1, 2, 1],
        "attention_levels": [False, True, True],
        "num_head_channels": [0, 8, 4],
        "norm_num_groups": 4,
    }
    conditioning = conditioning or {"type": "none"}
    return Settings.model_validate({"ldm": {"unet": unet, "conditioning": conditioning, "training": training}}).ldm


def pair(settings, classes=None):
    torch.manual_seed(0)
    unet = settings.unet
    stock = DiffusionModelUNet(
        3, 3, 3, unet.res_blocks, unet.num_channels, unet.attention_levels, unet.num_groups,
        num_head_channels=unet.head_channels, num_class_embeds=classes, use_flash_attention=True,
        resblock_updown=unet.resblock_updown,
    )  # fmt: skip
    for parameter in stock.parameters():  # MONAI starts the last convolution of each block at zero
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    ours = build_unet(settings, latent_channels=3)
    ours.load_state_dict(stock.state_dict())
    assert list(ours.state_dict()) == list(stock.state_dict())
    return stock.double(), ours.double()


def gradients(model, **labels):
    torch.manual_seed(1)
    x = torch.randn(2, 3, 8, 4, 12, dtype=torch.float64, requires_grad=True)
    out = model(x, torch.tensor([3, 700]), **labels)
    (out - torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).square().sum().backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters() if "to_k.bias" not in name}
    return {**named, "input": x.grad, "output": out.detach()}


@pytest.mark.parametrize("resblock_updown", [False, True])
@pytest.mark.parametrize(
    "knobs", [{}, {"use_gradient_checkpointing": True}, {"use_gradient_checkpointing_offload": True}]
)
def test_gradients_equal_stock(knobs, resblock_updown, monkeypatch):
    monkeypatch.setattr("models.checkpointing.MIN_OFFLOAD_BYTES", 0)
    stock, ours = pair(ldm_settings(resblock_updown=resblock_updown, **knobs))
    expected, found = gradients(stock), gradients(ours)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-12, name


def test_class_conditional_network_has_one_class_for_hidden_labels():
    stock, ours = pair(ldm_settings({"type": "class", "num_classes": 2}), classes=3)
    labels = {"class_labels": torch.tensor([0, 2])}
    expected, found = gradients(stock, **labels), gradients(ours, **labels)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-12, name


def test_checkpointing_acts_only_in_training_with_gradients(monkeypatch, caplog):
    from models import checkpointing

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


@pytest.mark.parametrize(("heads", "expected"), [(8, 2), ([8, 8, 0], 1)])
def test_middle_attends_where_the_last_level_does_not(heads, expected):
    settings = ldm_settings()
    unet = settings.unet.model_copy(update={"attention_levels": (False, True, False), "num_head_channels": heads})
    model = build_unet(settings.model_copy(update={"unet": unet}), latent_channels=3)
    assert model.middle_block.attention.attn.num_heads == expected
    assert model(torch.randn(1, 3, 8, 8, 8), torch.tensor([5])).shape == (1, 3, 8, 8, 8)
