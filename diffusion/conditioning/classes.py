"""Classes for conditional training: checks that the data has them, and finds a class by name or number."""

from __future__ import annotations

from collections.abc import Sequence

from data import DataSplit
from settings import ConfigError, DataError, Problem, UserError
from settings.ldm import ConditioningSettings


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
