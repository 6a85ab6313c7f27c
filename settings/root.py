"""The whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationInfo, model_validator

from settings.autoencoder import AutoencoderSettings
from settings.data import DataSettings
from settings.device import DeviceSettings
from settings.dotted import assign, overlap
from settings.errors import ConfigError
from settings.ldm import LdmSettings
from settings.logging import LoggingSettings
from settings.rules import find_problems
from settings.section import FREE, Section, key, section


class Settings(Section):
    """A validated configuration: one run, both stages."""

    name: str = key(
        "run",
        "Outputs go to the folder of this name in runs/.",
        FREE,
        pattern=r"^[\w][\w.-]*$",
        min_length=1,
        max_length=100,
    )
    seed: int = key(42, "Determines the initial weights, the batch order and the noise.", ge=0, lt=2**32)
    data: DataSettings = section(DataSettings, "The volumes to train on.")
    autoencoder: AutoencoderSettings = section(AutoencoderSettings, "Stage 1: the autoencoder.")
    ldm: LdmSettings = section(LdmSettings, "Stage 2: latent diffusion.")
    device: DeviceSettings = section(DeviceSettings, "Device and precision.")
    logging: LoggingSettings = section(LoggingSettings, "Trackers besides TensorBoard.")

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Settings:
        context = info.context or {}
        # A rule about a key that is already reported would only add noise.
        failed = context.get("failed", frozenset())
        problems = [
            problem
            for problem, sources in find_problems(self)
            if not any(overlap(key, bad) for bad in failed for key in (problem.where, *sources))
        ]
        if problems:
            raise ConfigError(problems)
        return self

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of a whole volume's latent: channels, then axes."""
        return (self.autoencoder.latent_channels, *self.autoencoder.latent_grid(self.data.voxel_size))

    @property
    def training_grid(self) -> tuple[int, ...]:
        """Return the grid of one stage-1 training step: a patch or a whole volume."""
        return self.data.training_grid

    @property
    def unet_grid(self) -> tuple[int, ...]:
        """Return the grid of the U-Net's highest level: that of a latent, padded."""
        return self.ldm.unet.level_grids(self.latent_shape[1:])[0]

    def with_overrides(self, changes: Mapping[str, Any]) -> Settings:
        """Return validated settings with dotted keys changed, such as {"data.num_workers": 4}."""
        values = self.model_dump()
        for dotted, value in changes.items():
            assign(values, dotted, value)
        return Settings.model_validate(values)
