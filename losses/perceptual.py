"""Chooses the perceptual term that the settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from settings import AutoencoderTraining


def build_perceptual_loss(
    training: AutoencoderTraining, in_channels: int, seed: int, load_weights: bool = True
) -> nn.Module | None:
    """The frozen perceptual term, called as `module(reconstruction, target, step)`, or None when it is switched off."""
    if not training.use_perceptual_loss:
        return None
    raise NotImplementedError
