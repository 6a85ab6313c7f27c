"""The class of each volume as a condition: embedded by the U-Net, with a class more that stands for a hidden one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from data import DataSplit
from diffusion.conditioning.kind import Asked, ConditionKind, Partners, Preparation, Prepared, Sample
from settings import ConfigError, DataError, Problem, Settings, UserError
from settings.conditioning import ConditioningSettings


class EmbeddedClass(ConditionKind):
    """A whole number (B,) that the U-Net embeds, with one that stands for a hidden one."""

    unet_input = "class_labels"
    draws = ("label",)

    def shape(self, settings: Settings) -> tuple[int, ...]:
        """Return the shape of one number."""
        return ()

    def hidden(self, part: Tensor) -> Tensor:
        """Return the hidden class."""
        return torch.full_like(part, self.s.hidden_class)

    def some_hidden(self, part: Tensor, is_hidden: Callable[[str], Tensor]) -> Tensor:
        """Hide some of the classes."""
        return torch.where(is_hidden("label"), self.s.hidden_class, part)


class ClassLabel(EmbeddedClass):
    """The class of a volume, from its folder or a table."""

    name = "class_label"

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on classes."""
        return self.s.type == "class"

    def prepare(self, partners: Partners, run: Preparation) -> Prepared:
        """Return how to read the classes, which the volumes come with."""
        labels = torch.tensor([file.label for file in run.files])
        return Prepared(lambda index, number, copy: labels[index])

    def from_command_line(self, asked: Asked, has_cases: bool) -> Callable[[Sample], Tensor]:
        """Return the class that is asked for; without one hide it in cases, and take the classes in turn otherwise."""
        if asked.class_name is not None:
            label = torch.tensor(class_number(asked.class_name, asked.class_names))
            return lambda sample: label
        if has_cases and not self.s.dropout:
            raise UserError(
                "--class: not given, but the run was trained with the class of every volume (dropout: 0); allowed: "
                f"{', '.join(asked.class_names)}; choose one of them"
            )
        hidden = torch.tensor(self.s.hidden_class)
        return lambda sample: torch.tensor(sample.position % self.s.num_classes) if sample.case is None else hidden


def check_classes(s: ConditioningSettings, volumes: DataSplit) -> None:
    """Raise if a volume has no class, or if the number of classes differs from the settings."""
    if s.type == "none":
        return
    unlabelled = [file.name for file in (*volumes.train, *volumes.val) if file.label is None]
    if unlabelled:
        raise DataError(
            f"{unlabelled[0]}: no class; {len(unlabelled)} of {len(volumes.train) + len(volumes.val)} volumes have "
            "none; ldm.conditioning.type: class needs one for each; put the volumes into one folder per class, give a "
            "CSV in data.class_labels, or set ldm.conditioning.type: none"
        )
    if len(volumes.class_names) != s.num_classes:
        found = f"{s.num_classes}, but the data has {len(volumes.class_names)} ({', '.join(volumes.class_names)})"
        raise ConfigError([Problem("ldm.conditioning.num_classes", found, "", f"set {len(volumes.class_names)}")])


def class_number(asked: str, class_names: Sequence[str]) -> int:
    """Return the number of a class given by name or number; raise `UserError` with the valid names."""
    if asked in class_names:
        return class_names.index(asked)
    if asked.isdecimal() and int(asked) < len(class_names):
        return int(asked)
    if not class_names:
        raise UserError(f"--class: {asked!r}, but the run was trained without classes; omit --class")
    raise UserError(
        f"--class: {asked!r} is not a class of the run; allowed: {', '.join(class_names)}; choose one of them"
    )
