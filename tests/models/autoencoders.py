"""Small autoencoders, stock and lean, and pairs of them with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from monai.networks.nets import AutoencoderKL

from models import LeanAutoencoder, build_autoencoder
from settings import Settings


def settings_of(training: dict[str, Any] | None = None, **autoencoder: Any) -> Any:
    small = {"num_channels": [8, 16, 16], "norm_num_groups": 4, "num_res_blocks": 1}
    return Settings.model_validate(
        {"autoencoder": {**small, **autoencoder, "training": {"use_gradient_checkpointing": False, **(training or {})}}}
    ).autoencoder


def stock_like(settings: Any) -> AutoencoderKL:
    """MONAI's own class, built without any of our code."""
    return AutoencoderKL(
        spatial_dims=3,
        in_channels=settings.in_channels,
        out_channels=settings.in_channels,
        num_res_blocks=settings.res_blocks,
        channels=settings.num_channels,
        attention_levels=settings.attention_levels,
        latent_channels=settings.latent_channels,
        norm_num_groups=settings.num_groups,
        with_encoder_nonlocal_attn=settings.has_middle_attention,
        with_decoder_nonlocal_attn=settings.has_middle_attention,
        use_flash_attention=True,
    )


def pair(settings: Any) -> tuple[AutoencoderKL, LeanAutoencoder]:
    """Two networks with the same weights, none of them at a special value such as a norm's one and zero."""
    torch.manual_seed(0)
    stock = stock_like(settings)
    for parameter in stock.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    lean = build_autoencoder(settings)
    assert isinstance(lean, LeanAutoencoder)
    lean.load_state_dict(stock.state_dict())
    return stock, lean
