"""The `ldm.conditioning` section: its keys, and the rules between them."""

from __future__ import annotations

from settings.conditioning.sections import ConditioningSettings, LabelMapSettings

__all__ = ["ConditioningSettings", "LabelMapSettings"]
