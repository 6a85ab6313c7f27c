"""The whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationInfo, model_validator

from settings.autoencoder import AutoencoderSettings
from settings.data import DataSettings
from settings.errors import ConfigError
from settings.ldm import LdmSettings
from settings.rules import find_problems
from settings.section import FOLDER_NAME, FREE, SAME, Section, TrainingSettings, assign, key, overlap, section


class DeviceSettings(Section):
    """The `device` section."""

    type: Literal["auto", "cuda", "cpu"] = key("auto", "auto: CUDA if available, else the CPU.", FREE)
    mixed_precision: bool = key(False, "Run convolutions and attention in 16-bit precision.")
    amp_dtype: Literal["auto", "bfloat16", "float16"] = key(
        "auto",
        "auto: bfloat16 if the GPU supports it, else float16 with gradient scaling; on a CPU, where 16 bits are many "
        "times slower, float32.",
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = key(
        "auto", "Memory layout of volumes; auto: channels_last, but contiguous for MONAI's stock autoencoder.", SAME
    )
    allocator: str = key(
        "expandable_segments:True",
        "Value of PYTORCH_CUDA_ALLOC_CONF, set before CUDA starts; empty: do not set it.",
        SAME,
        pattern=r"^$|^\w+:[^,:]+(,\w+:[^,:]+)*$",
    )

    def is_half(self, on_cpu: bool) -> bool:
        """Return whether a device computes in 16 bits; a CPU does only if `amp_dtype` names the type."""
        return self.mixed_precision and not (on_cpu and self.amp_dtype == "auto")


class Settings(Section):
    """A validated configuration: one run, both stages."""

    name: str = key(
        "run",
        "Outputs go to the folder of this name in runs/.",
        FREE,
        pattern=FOLDER_NAME,
        min_length=1,
        max_length=60,  # characters of up to 4 bytes, of which a folder's name has 255 at most
    )
    seed: int = key(42, "Determines the initial weights, the batch order and the noise.", ge=0, lt=2**32)
    data: DataSettings = section(DataSettings, "The volumes to train on.")
    autoencoder: AutoencoderSettings = section(AutoencoderSettings, "Stage 1: the autoencoder.")
    ldm: LdmSettings = section(LdmSettings, "Stage 2: latent diffusion.")
    device: DeviceSettings = section(DeviceSettings, "Device and precision.")

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Settings:
        context = info.context or {}
        # A rule about a key that is already reported would only add noise.
        failed = context.get("failed", frozenset())
        problems = [
            problem
            for problem in find_problems(self)
            if not any(overlap(key, bad) for bad in failed for key in (problem.where, *problem.others))
        ]
        if problems:
            raise ConfigError(problems)
        return self

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of a whole volume's latent: channels, then axes."""
        return (self.autoencoder.latent_channels, *self.autoencoder.latent_grid(self.data.voxel_size))

    @property
    def mean_map_shape(self) -> tuple[int, ...] | None:
        """Return the shape of the mean latent that the U-Net gets as further inputs; None if it gets none."""
        return self.latent_shape if self.ldm.unet.use_mean_map else None

    def training_of(self, stage: str) -> TrainingSettings:
        """Return how a stage, `autoencoder` or `ldm`, is trained."""
        return self.autoencoder.training if stage == "autoencoder" else self.ldm.training

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
