"""The `ldm.conditioning` section: its keys, and the rules between them."""

from __future__ import annotations

from settings.conditioning.scan import ScanSettings
from settings.conditioning.sections import (
    TARGET,
    ConditioningSettings,
    DegradeSettings,
    LabelMapSettings,
    TabularSettings,
    VolumeSettings,
)

__all__ = [
    "TARGET",
    "ConditioningSettings",
    "DegradeSettings",
    "LabelMapSettings",
    "ScanSettings",
    "TabularSettings",
    "VolumeSettings",
]
