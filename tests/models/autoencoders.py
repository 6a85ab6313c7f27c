"""Pairs of stock and lean autoencoders with the same weights, and one pass through either with all its gradients."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from monai.networks.nets import AutoencoderKL
from torch import Tensor

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


def pair(settings: Any, dtype: torch.dtype = torch.float64) -> tuple[AutoencoderKL, LeanAutoencoder]:
    """Two networks with the same weights, none of them at a special value such as a norm's one and zero."""
    torch.manual_seed(0)
    stock = stock_like(settings)
    for parameter in stock.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    lean = build_autoencoder(settings)
    assert isinstance(lean, LeanAutoencoder)
    lean.load_state_dict(stock.state_dict())
    return stock.to(dtype), lean.to(dtype)


@dataclass
class Pass:
    """Results and gradients of one forward and backward."""

    reconstruction: Tensor
    gradients: dict[str, Tensor]

    def distance(self, other: Pass) -> float:
        """The largest relative distance of any gradient, and of the reconstruction, from those of `other`."""
        pairs = [(self.reconstruction, other.reconstruction)]
        pairs += [(self.gradients[name], gradient) for name, gradient in other.gradients.items()]
        return max(float((mine.double() - theirs).norm() / theirs.norm()) for mine, theirs in pairs)

    def total_distance(self, other: Pass) -> float:
        """The relative distance of all gradients taken together."""
        difference = sum(float((self.gradients[n].double() - g).square().sum()) for n, g in other.gradients.items())
        return (difference / sum(float(g.square().sum()) for g in other.gradients.values())) ** 0.5


def run(model: AutoencoderKL, x: Tensor, noise: Tensor, autocast: torch.dtype | None = None) -> Pass:
    """One training pass; the loss has a gradient at every output and is no symmetric function of it."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        mean, sigma = model.encode(x)
        reconstruction = model.decode(mean + sigma * noise)
    target = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    loss = (reconstruction.to(x.dtype) - target).square().sum() + mean.to(x.dtype).sum() + sigma.to(x.dtype).log().sum()
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    # A key's bias shifts all scores of a query alike, so its true gradient is zero and what remains is rounding.
    gradients = {name: gradient for name, gradient in gradients.items() if "to_k.bias" not in name}
    assert x.grad is not None
    return Pass(reconstruction.detach().double(), {**gradients, "input": x.grad.double()})


def truth(stock: AutoencoderKL, x: Tensor, noise: Tensor) -> Pass:
    """The pass of a stock network in double precision."""
    return run(copy.deepcopy(stock).double(), x.double(), noise.double())
