"""The patch discriminator of stage 1."""

from __future__ import annotations

from typing import Any

from monai.networks.nets import PatchDiscriminator
from torch import Tensor, nn

from models.lean.layout import LaidOut, arranged
from models.lean.norm import InstanceNorm
from settings import AutoencoderSettings


class Discriminator(PatchDiscriminator, LaidOut):
    """MONAI's `PatchDiscriminator` with the same parameters, and norms that keep the memory layout of their input."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.InstanceNorm3d):
                    setattr(module, name, InstanceNorm(child))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the features of every layer, the logits last."""
        return super().forward(arranged(x, self.layout))


def discriminator_arguments(settings: AutoencoderSettings) -> dict[str, Any]:
    """Return the arguments of `PatchDiscriminator`; batch norm would make micro-batches differ from one large batch."""
    chosen = settings.training.discriminator
    return {
        "spatial_dims": 3,
        "in_channels": settings.in_channels,
        "out_channels": 1,
        "channels": chosen.num_channels,
        "num_layers_d": chosen.num_layers_d,
        "norm": "INSTANCE",
    }


def build_discriminator(settings: AutoencoderSettings) -> Discriminator:
    """Build the discriminator."""
    return Discriminator(**discriminator_arguments(settings))
