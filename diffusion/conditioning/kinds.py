"""All kinds of conditions, in the order in which the U-Net gets them."""

from __future__ import annotations

from diffusion.conditioning.class_label import ClassLabel
from diffusion.conditioning.kind import ConditionKind
from diffusion.conditioning.label_map import LabelMap
from diffusion.conditioning.scan import Modality, Scan
from diffusion.conditioning.tabular import Tabular
from diffusion.conditioning.volume import ConditionVolume
from settings.conditioning import ConditioningSettings

KINDS: tuple[type[ConditionKind], ...] = (ClassLabel, Modality, LabelMap, ConditionVolume, Tabular, Scan)


def kinds_of(s: ConditioningSettings) -> list[ConditionKind]:
    """Return the kinds of conditions in use."""
    return [kind for kind in (cls(s) for cls in KINDS) if kind.is_used]
