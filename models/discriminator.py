"""The patch discriminator of stage 1."""

from __future__ import annotations

from monai.networks.nets import PatchDiscriminator

from settings import AutoencoderSettings


def build_discriminator(settings: AutoencoderSettings) -> PatchDiscriminator:
    """Build the discriminator; its forward returns the features of every layer, the logits last.

    Instance norm, because MONAI's default, batch norm, makes accumulated micro-batches differ from one large batch.
    """
    size = settings.training.discriminator
    return PatchDiscriminator(
        spatial_dims=3,
        in_channels=settings.in_channels,
        out_channels=1,
        channels=size.num_channels,
        num_layers_d=size.num_layers_d,
        norm="INSTANCE",
    )
