"""The conditions of one batch as one object, which data, step, sampler and predictor pass on; and how to hide them.

Hidden channels and numbers are zeros, which no condition that is given can be: the shares of label values add up to 1,
a volume comes with a channel that says where it is known, and a number with a 1. A hidden class has a number of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from settings.conditioning import ConditioningSettings

# Share of the samples in which all conditions are hidden by one draw. Were all draws independent, the network would
# hardly ever see none of several conditions, which is what guidance compares with.
TOGETHER = 0.5


@dataclass(frozen=True)
class Condition:
    """What a batch is conditioned on.

    Numbers of classes or modalities (B,), channels (B, C, D, H, W) to join to the noisy latent, coded numbers (B, N),
    and what MAISI's U-Net is told of a scan (B, M), which is never hidden.
    """

    classes: Tensor | None = None
    joined: Tensor | None = None
    numbers: Tensor | None = None
    scan: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        """Return all parts in the order of the fields."""
        return self.classes, self.joined, self.numbers, self.scan

    def map(self, change: Callable[[Tensor], Tensor]) -> Condition:
        """Return the condition with every tensor changed."""
        return Condition(*(None if part is None else change(part) for part in self.parts))

    def to(self, device: torch.device) -> Condition:
        """Return the condition on `device`, copied without waiting for the copy."""
        return self.map(lambda part: part.to(device, non_blocking=True))

    def beside(self, other: Condition) -> Condition:
        """Return one condition for this batch followed by the batch of `other`, which has the same parts."""
        pairs = zip(self.parts, other.parts, strict=True)
        return Condition(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs))

    def joined_to(self, noisy: Tensor) -> Tensor:
        """Return the noisy latent followed by the condition's channels."""
        return noisy if self.joined is None else torch.cat([noisy, self.joined], dim=1)

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Return what the network takes besides its input and the times."""
        told = {"class_labels": self.classes, "numbers": self.numbers, "scan": self.scan}
        return {name: part for name, part in told.items() if part is not None}


NOTHING = Condition()
"""The condition of a network that has none."""


def hidden(condition: Condition, s: ConditioningSettings) -> Condition:
    """Return the condition of the same shape that says nothing."""
    classes = None if condition.classes is None else torch.full_like(condition.classes, s.hidden_class)
    return replace(condition.map(torch.zeros_like), classes=classes, scan=condition.scan)


def some_hidden(condition: Condition, s: ConditioningSettings, draw: Callable[[str], Tensor]) -> Condition:
    """Hide each part of each sample with the probability that the settings say.

    `draw` returns a uniform number in [0, 1) for each sample and purpose.
    """
    several = len(s.kinds) > 1 or len(s.tabular.columns) > 1
    together, of_all = (draw("hide together") < TOGETHER, draw("hide all")) if several else (None, None)

    def is_hidden(purpose: str) -> Tensor:
        own = draw(purpose)
        if together is not None and of_all is not None:
            own = torch.where(together, of_all, own)
        return own < s.dropout

    classes, joined = condition.classes, condition.joined
    if classes is not None:
        classes = torch.where(is_hidden("label"), s.hidden_class, classes)
    if joined is not None:
        of_labels = s.label_map.num_classes
        kinds = {"label map": joined[:, :of_labels], "volume": joined[:, of_labels:]}
        parts = [
            part * (~is_hidden(purpose))[:, None, None, None, None] for purpose, part in kinds.items() if part.shape[1]
        ]
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    numbers = condition.numbers
    if numbers is not None:
        columns = zip(s.tabular.columns, numbers.split(s.tabular.widths, dim=1), strict=True)
        shown = [part * (~is_hidden(f"number {name}"))[:, None] for name, part in columns]
        numbers = torch.cat(shown, dim=1)
    return Condition(classes, joined, numbers, condition.scan)
