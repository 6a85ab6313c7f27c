"""The keys of `ldm.conditioning`: what samples are conditioned on."""

from __future__ import annotations

from typing import Literal

from settings.section import FREE, PathText, Section, key, section

_SOURCE = (
    "a folder whose files have the names of the volumes, a CSV file with columns file and {column}, or key:NAME of "
    "data.source's dataset.json"
)


class LabelMapSettings(Section):
    """Label maps, joined to the noisy latent as the share of each label value in each voxel of the latent."""

    source: PathText | None = key(None, f"Label maps: {_SOURCE.format(column='labels')}; null: none.", FREE)
    num_classes: int = key(
        0,
        "Number of label values, with the background: they run from 0 to one less; 0: no label maps.",
        ge=0,
        le=1024,
    )
    dropout: float = key(0.1, "Fraction of label maps hidden in training; guidance needs it.", ge=0, lt=1)

    @property
    def num_joined(self) -> int:
        """Return the number of channels that are joined to the noisy latent."""
        return self.num_classes


class ConditioningSettings(Section):
    """What samples are conditioned on: any combination of a class and the subsections."""

    type: Literal["none", "class"] = key("none", "Whether samples are conditioned on the class of their volume.")
    num_classes: int = key(0, "Number of classes in the data; required if the type is class.", ge=0, le=65_536)
    dropout: float = key(0.1, "Fraction of class labels hidden in training; guidance needs it.", ge=0, lt=1)
    labels: LabelMapSettings = section(LabelMapSettings, "Label maps as conditions.")

    @property
    def dropouts(self) -> dict[str, float]:
        """Return the fraction that is hidden in training of each condition in use, by its key in the config."""
        kinds = {
            "ldm.conditioning": (self.type == "class", self.dropout),
            "ldm.conditioning.labels": (self.labels.num_classes > 0, self.labels.dropout),
        }
        return {where: dropout for where, (is_used, dropout) in kinds.items() if is_used}

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on anything."""
        return bool(self.dropouts)

    @property
    def needs_pairs(self) -> bool:
        """Return whether each volume needs more than its own file and its class."""
        return self.labels.num_classes > 0

    def num_joined(self, latent_channels: int) -> int:
        """Return the number of channels that are joined to a noisy latent of `latent_channels` channels."""
        return self.labels.num_joined
