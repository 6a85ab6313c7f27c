"""What samples are conditioned on: classes, label maps and volumes, as the network takes them."""

from __future__ import annotations

from data import DataSplit
from data.pairs.pairs import Pairs, prepare_pairs
from diffusion.conditioning.classes import check_classes, class_number
from diffusion.conditioning.condition import NOTHING, Condition, hidden, some_hidden
from settings import Settings

__all__ = ["NOTHING", "Condition", "check_classes", "check_conditions", "class_number", "hidden", "some_hidden"]


def check_conditions(settings: Settings, volumes: DataSplit) -> Pairs:
    """Find and check what the volumes are conditioned on; raise with every problem."""
    check_classes(settings.ldm.conditioning, volumes)
    return prepare_pairs(settings.ldm.conditioning, settings.data, volumes)
