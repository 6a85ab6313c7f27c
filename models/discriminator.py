"""The patch discriminator of stage 1."""

from __future__ import annotations

from monai.networks.nets import PatchDiscriminator

from models.arguments import discriminator_arguments
from settings import AutoencoderSettings


def build_discriminator(settings: AutoencoderSettings) -> PatchDiscriminator:
    """Build the discriminator; its forward returns the features of every layer, the logits last."""
    return PatchDiscriminator(**discriminator_arguments(settings))
