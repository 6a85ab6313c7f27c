"""Rules between the keys of `ldm.conditioning`, and between them and the guidance of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from settings.errors import Problem
from storage.names import counted

if TYPE_CHECKING:
    from settings.ldm import LdmSettings

Found = Iterator[tuple[Problem, tuple[str, ...]]]


def conditioning_problems(ldm: LdmSettings) -> Found:
    """Yield each problem with the other keys involved."""
    conditioning = ldm.conditioning
    if conditioning.type == "class" and conditioning.num_classes < 2:
        found = f"{counted(conditioning.num_classes, 'class')} for conditioning type class"
        remedy = "set it to the number of classes in the data"
        yield (
            Problem("ldm.conditioning.num_classes", found, "allowed: 2 or more", remedy),
            ("ldm.conditioning.type",),
        )
    yield from _label_maps(ldm)
    yield from _guidance(ldm)


def _label_maps(ldm: LdmSettings) -> Found:
    where, labels = "ldm.conditioning.labels", ldm.conditioning.labels
    if labels.num_classes == 1:
        remedy = "count the background too: 2 for background and one structure"
        yield Problem(f"{where}.num_classes", "1 label value", "allowed: 0, or 2 or more", remedy), ()
    if labels.num_classes and labels.source is None:
        remedy = "set it to the folder of the label maps, or num_classes: 0"
        yield Problem(f"{where}.source", "null with num_classes above 0", "", remedy), (f"{where}.num_classes",)
    if labels.source is not None and not labels.num_classes:
        remedy = "set it to the number of label values with the background, or source: null"
        yield Problem(f"{where}.num_classes", "0 with a source of label maps", "", remedy), (f"{where}.source",)


def _guidance(ldm: LdmSettings) -> Found:
    scale, dropouts = ldm.sampling.guidance_scale, ldm.conditioning.dropouts
    if scale != 1 and not dropouts:
        found = f"{scale:g} with conditioning type none, so there is no class to follow"
        yield Problem("ldm.sampling.guidance_scale", found, "allowed: 1", "set 1"), ("ldm.conditioning.type",)
    elif scale != 1 and 0 in dropouts.values():
        never = next(where for where, dropout in dropouts.items() if dropout == 0)
        what = "class" if never == "ldm.conditioning" else "condition"
        found = f"{scale:g} with conditioning dropout 0, so the network never learns to predict without a {what}"
        sources = ("ldm.conditioning.type", f"{never}.dropout")
        yield Problem("ldm.sampling.guidance_scale", found, "allowed: 1", "set 1"), sources
    lowest, highest = ldm.sampling.guidance_interval
    if lowest >= highest:
        found = f"{lowest:g} is not below {highest:g}"
        yield Problem("ldm.sampling.guidance_interval", found, "", "swap the two"), ()
