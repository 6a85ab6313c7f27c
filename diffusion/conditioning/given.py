"""Conditions that a command is given as files: found, checked, and brought to the latent grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.discovery import expanded
from data.formats import SUFFIXES, suffix_of
from data.geometry import Geometry, geometry_of
from data.pairs.label_maps import label_problem, label_shares
from data.pairs.pairs import LABELS, label_reading
from data.reading import measure
from diffusion.conditioning.condition import Condition
from diffusion.conditioning.conditions import empty_condition
from settings import DataError, Settings, UserError
from storage.names import printable


@dataclass(frozen=True)
class GivenCondition:
    """One case: its name, its channels on the latent grid (C, D, H, W), and the space that its files lie in."""

    name: str
    joined: Tensor
    geometry: Geometry

    def condition(self, settings: Settings, number: int, label: int | None = None) -> Condition:
        """Return the condition of `number` samples of the case."""
        nothing = empty_condition(settings, number)
        classes = None if nothing.classes is None else torch.full_like(nothing.classes, _class(settings, label))
        return replace(nothing, classes=classes, joined=self.joined.expand(number, -1, -1, -1, -1))

    def restored(self, voxels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bring a (C, D, H, W) volume from the network's grid back to that of the files; return it with its affine."""
        return np.ascontiguousarray(self.geometry.to_file_grid(voxels)), self.geometry.affine


def _class(settings: Settings, label: int | None) -> int:
    return settings.ldm.conditioning.num_classes if label is None else label


def given_conditions(settings: Settings, labels: str | None) -> list[GivenCondition]:
    """Return the cases of the files that a command is given, in the order of their names; empty without files.

    Raises `UserError` if the run was not trained on such files, and DataError, naming the file, if one does not suit.
    """
    conditioning = settings.ldm.conditioning
    if labels is None:
        if conditioning.labels.num_classes and not conditioning.labels.dropout:
            raise UserError(
                "--labels: not given, but the run was trained with a label map for every volume "
                "(ldm.conditioning.labels.dropout: 0); give a label map or a folder of them"
            )
        return []
    if not conditioning.labels.num_classes:
        raise UserError("--labels: the run was trained without label maps; leave it out")
    return [_label_map(path, settings) for path in files_of(labels, "--labels")]


def files_of(place: str, option: str) -> list[Path]:
    """Return the volume file that an option names, or those of the folder that it names."""
    path = expanded(place)
    if path.is_dir():
        found = sorted(item for item in path.iterdir() if suffix_of(item.name) and not item.name.startswith("."))
        if found:
            return found
    elif path.is_file():
        return [path]
    what = "holds no volume" if path.is_dir() else "does not exist"
    raise UserError(f"{option}: {printable(place)} {what}; a file ({' '.join(SUFFIXES)}) or a folder of them is needed")


def _label_map(path: Path, settings: Settings) -> GivenCondition:
    number = settings.ldm.conditioning.labels.num_classes
    _, facts = measure(path, label_reading(settings.data, number))
    problem = label_problem(path, facts, number, LABELS)
    if problem is not None:
        raise DataError(problem)
    shares = label_shares(path, number, settings.data, settings.latent_shape[1:])
    return GivenCondition(stem_of(path), torch.from_numpy(shares), geometry_of(facts.header, settings.data))


def stem_of(path: Path) -> str:
    """Return a file's name without the ending of its type."""
    return path.name[: len(path.name) - len(suffix_of(path.name) or "")]
