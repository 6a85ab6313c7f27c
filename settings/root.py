"""The whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationInfo, model_validator

from settings.autoencoder import AutoencoderSettings
from settings.data import DataSettings
from settings.device import DeviceSettings
from settings.errors import ConfigError
from settings.ldm import LdmSettings
from settings.rules import find_problems
from settings.section import FREE, Section, key, section


class Settings(Section):
    """A validated configuration: one run, both stages."""

    name: str = key("run", "Outputs go to runs/<name>.", FREE, pattern=r"^[\w][\w.-]*$", min_length=1, max_length=100)
    seed: int = key(42, "Decides weights, batch order and noise.", ge=0, lt=2**32)
    data: DataSettings = section(DataSettings, "The volumes.")
    autoencoder: AutoencoderSettings = section(AutoencoderSettings, "Stage 1.")
    ldm: LdmSettings = section(LdmSettings, "Stage 2.")
    device: DeviceSettings = section(DeviceSettings, "Where it runs.")

    @model_validator(mode="after")
    def _follows_the_rules(self, info: ValidationInfo) -> Settings:
        context = info.context or {}
        # A rule that rests on a key which is itself wrong would only add noise to the report.
        failed = context.get("failed", frozenset())
        problems = [
            problem
            for problem, sources in find_problems(self, context.get("stage"))
            if not any(_touches(key, bad) for bad in failed for key in (problem.where, *sources))
        ]
        if problems:
            raise ConfigError(problems)
        return self

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Return channels and axes of the latent of a whole volume."""
        factor = self.autoencoder.downsampling
        return (self.autoencoder.latent_channels, *(axis // factor for axis in self.data.voxel_size))

    @property
    def training_grid(self) -> tuple[int, ...]:
        """Return the grid that a stage-1 training step sees."""
        return self.data.training_grid

    def with_overrides(self, changes: Mapping[str, Any], stage: str | None = None) -> Settings:
        """Return validated settings with dotted keys changed, such as {"data.num_workers": 4}."""
        values = self.model_dump()
        for dotted, value in changes.items():
            *parents, last = dotted.split(".")
            place = values
            for parent in parents:
                place = place[parent]
            place[last] = value
        return Settings.model_validate(values, context={"stage": stage})


def _touches(dotted: str, bad: str) -> bool:
    """Return whether one of two dotted keys is the other or lies inside it."""
    return dotted == bad or dotted.startswith(bad + ".") or bad.startswith(dotted + ".")
