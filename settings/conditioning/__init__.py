"""The `ldm.conditioning` section: its keys, with a section for each kind of condition, and the rules between them."""

from __future__ import annotations

from settings.conditioning.scan import ScanSettings
from settings.conditioning.sections import (
    ConditioningSettings,
    DegradeSettings,
    LabelMapSettings,
    TabularSettings,
    VolumeSettings,
)

__all__ = [
    "ConditioningSettings",
    "DegradeSettings",
    "LabelMapSettings",
    "ScanSettings",
    "TabularSettings",
    "VolumeSettings",
]
