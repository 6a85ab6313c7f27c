"""The classes of a conditional stage 2: whether the data has them, and which number a name has."""

from __future__ import annotations

from collections.abc import Sequence

from data import DataSplit
from settings import ConfigError, DataError, Problem, UserError
from settings.ldm import ConditioningSettings


def check_classes(s: ConditioningSettings, volumes: DataSplit) -> None:
    """Raise when the volumes have no classes, or another number of them than the settings say."""
    if s.type == "none":
        return
    unlabelled = [file.name for file in (*volumes.train, *volumes.val) if file.label is None]
    if unlabelled:
        raise DataError(
            f"{unlabelled[0]}: no class, like {len(unlabelled)} of {len(volumes.train) + len(volumes.val)} volumes; "
            "conditioning type class needs one for each; sort the volumes into folders named by class, name a CSV in "
            "data.labels, or set ldm.conditioning.type: none"
        )
    if len(volumes.class_names) != s.num_classes:
        found = f"{s.num_classes}, but the data has {len(volumes.class_names)} ({', '.join(volumes.class_names)})"
        raise ConfigError([Problem("ldm.conditioning.num_classes", found, "", f"set {len(volumes.class_names)}")])


def class_number(asked: str, class_names: Sequence[str]) -> int:
    """Return the number of a class given by its name or number; raise `UserError` naming those there are."""
    if asked in class_names:
        return class_names.index(asked)
    if asked.isdecimal() and int(asked) < len(class_names):
        return int(asked)
    if not class_names:
        raise UserError(f"--class: {asked!r}, but the run was trained without classes; leave --class out")
    raise UserError(
        f"--class: {asked!r} is not a class of the run; allowed: {', '.join(class_names)}; choose one of them"
    )
