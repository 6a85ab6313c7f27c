"""What samples are conditioned on: classes and label maps, as the network takes them."""

from __future__ import annotations

from diffusion.conditioning.classes import check_classes, class_number
from diffusion.conditioning.condition import NOTHING, Condition, hidden, some_hidden

__all__ = ["NOTHING", "Condition", "check_classes", "class_number", "hidden", "some_hidden"]
