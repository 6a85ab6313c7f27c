"""The conditions of a run: partners found and checked, made once, and read back for each batch by index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data import DataSplit, VolumeFile
from diffusion.conditioning.batch import ConditionBatch
from diffusion.conditioning.class_label import check_classes
from diffusion.conditioning.kind import Partners, Preparation, Prepared
from diffusion.conditioning.kinds import kinds_of
from diffusion.conditioning.known_voxels import KnownVoxels
from diffusion.conditioning.volume import ConditionVolume, held_out_with_hole
from runtime.files import counted
from settings import DataError, DataSettings, Settings
from settings.conditioning import ConditioningSettings

Pairs = Mapping[str, Partners]
"""The partners of all volumes by the name of the kind of condition."""

MOST_LINES = 10
"""Problems with partners that are named one by one; scripts/check_data.py --json has all of them."""


def find_partners_of(
    s: ConditioningSettings, data: DataSettings, files: Sequence[VolumeFile]
) -> tuple[Pairs, list[str]]:
    """Return the partners of volumes, and every problem with them; without a problem no partner is missing."""
    problems: list[str] = []
    return {kind.name: kind.find(files, data, problems) for kind in kinds_of(s)}, problems


def check_conditions(settings: Settings, volumes: DataSplit) -> Pairs:
    """Find and check what the volumes are conditioned on; raise with every problem."""
    s = settings.ldm.conditioning
    check_classes(s, volumes)
    pairs, problems = find_partners_of(s, settings.data, (*volumes.train, *volumes.val))
    if problems:
        more = [f"and {len(problems) - MOST_LINES} more"] if len(problems) > MOST_LINES else []
        lines = "\n".join(f"  {problem}" for problem in [*problems[:MOST_LINES], *more])
        raise DataError(f"ldm.conditioning: {counted(len(problems), 'problem')} with the volumes' partners:\n{lines}")
    # Evaluation would refuse it only after training.
    held_out_with_hole(pairs.get(ConditionVolume.name), volumes.val, settings.data)
    return pairs


@dataclass(frozen=True)
class ConditionStore:
    """How to read the conditions of volumes by their indices, training volumes first.

    `prepared` has each kind by its name. `digest` is the hash of the content of all partners, which decides what a run
    learns; None if there are no conditions but classes.
    """

    prepared: Mapping[str, Prepared]
    digest: str | None = None

    def batch(
        self, indices: Sequence[int], passes: Sequence[int] | None = None, copies: Sequence[int] | None = None
    ) -> ConditionBatch:
        """Return the conditions of volumes.

        A volume whose condition has variants has another in each pass over the volumes, the first by default. `copies`
        are the numbers of the volumes' augmented copies.
        """
        first = [0] * len(indices)
        entries = list(zip(indices, passes or first, copies or first, strict=True))
        parts = {name: [kind.read(*entry) for entry in entries] for name, kind in self.prepared.items()}
        return ConditionBatch({name: torch.stack(rows) for name, rows in parts.items()})

    def pictures(self, index: int) -> dict[str, Tensor]:
        """Return the conditions of a volume that are volumes too, as (D, H, W) in [0, 1], to look at."""
        shown = {name: kind.picture for name, kind in self.prepared.items()}
        return {name: picture(index) for name, picture in shown.items() if picture is not None}

    def known(self, index: int) -> KnownVoxels | None:
        """Return what the condition of a volume knows of the volume; None if it is not made from it."""
        found = (kind.known for kind in self.prepared.values() if kind.known is not None)
        known = next(found, None)
        return None if known is None else known(index)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what is stored with the trained weights because sampling needs it."""
        return {name: value for kind in self.prepared.values() for name, value in kind.metadata.items()}


def prepare_conditions(pairs: Pairs, run: Preparation) -> ConditionStore | None:
    """Make the conditions of all volumes that are not cached yet; None if there are none."""
    s = run.settings.ldm.conditioning
    kinds = kinds_of(s)
    if not kinds:
        return None
    prepared = {kind.name: kind.prepare(pairs.get(kind.name, Partners()), run) for kind in kinds}
    return ConditionStore(prepared, partners_digest(pairs) if s.comes_from_volumes else None)


def partners_digest(pairs: Pairs) -> str:
    """Return a hash of the content of all partners."""
    by_role = [part for partners in pairs.values() for part in partners.files.items()]
    lines = [f"{role}\t{file.digest}" for role, files in by_role for file in files]
    lines += [json.dumps(row, sort_keys=True) for partners in pairs.values() for row in partners.rows]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
