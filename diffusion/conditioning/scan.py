"""What MAISI's U-Net takes of a scan: its modality, as a class, and its spacing and body regions, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from data import VolumeFile
from data.formats import read_header
from data.geometry import geometry_of
from data.partners import read_rows
from diffusion.conditioning.class_label import EmbeddedClass
from diffusion.conditioning.kind import Asked, ConditionKind, Partners, Preparation, Prepared, Sample
from runtime.files import printable
from settings import DataSettings, Settings, UserError
from settings.conditioning import COLUMNS, NUM_MODALITIES, REGIONS, SCAN, ScanSettings

UNIT = 100.0
"""MAISI was trained with spacing in hundredths of a millimetre, and with 100 in the place of a region."""


class Modality(EmbeddedClass):
    """The modality of all volumes, embedded as a class."""

    name = "modality"

    @property
    def is_used(self) -> bool:
        """Return whether the U-Net takes a modality."""
        return self.s.scan.modality is not None

    def prepare(self, partners: Partners, run: Preparation) -> Prepared:
        """Return the modality of every volume."""
        modality = torch.tensor(self.s.scan.modality)
        return Prepared(lambda index, number, copy: modality)

    def number_names(self, asked: Asked) -> Sequence[str]:
        """Return its name."""
        return (self.name,)

    def from_command_line(self, asked: Asked, has_cases: bool) -> Callable[[Sample], Tensor]:
        """Return the modality that is asked for, or that of training."""
        allowed = [*map(str, range(NUM_MODALITIES))]
        text = asked.numbers.get(self.name, str(self.s.scan.modality))
        modality = torch.tensor(int(_check_choice(self.name, text, allowed, f"0 to {allowed[-1]}")))
        return lambda sample: modality


class Scan(ConditionKind):
    """The spacing and the regions of a scan (B, M), which are never hidden."""

    name = "scan"
    section = "scan"
    unet_input = "scan"
    draws = ()

    def shape(self, settings: Settings) -> tuple[int, ...]:
        """Return the shape of the numbers of one sample."""
        return (self.s.scan.width,)

    def find(self, files: Sequence[VolumeFile], data: DataSettings, problems: list[str]) -> Partners:
        """Read the body regions of each volume, if a table has them."""
        s, key = self.s.scan, f"{SCAN}.regions"
        if s.table is None:
            return Partners()
        rows = read_rows(s.table, COLUMNS, files, key, problems)
        problems += [
            f"{key}: {printable(s.table)} has the region {printable(word)}; allowed: {', '.join(REGIONS)}; correct it"
            for word in sorted({word for row in rows.values() for word in row.values()} - {*REGIONS, ""})
        ]
        return Partners(rows=tuple(rows.values()))

    def prepare(self, partners: Partners, run: Preparation) -> Prepared:
        """Return the numbers of all volumes, each with its own spacing on the grid."""
        spacings = [geometry_of(read_header(file.path), run.settings.data).spacing_mm.tolist() for file in run.files]
        rows = zip(spacings, partners.rows or [{}] * len(spacings), strict=True)
        vectors = torch.tensor([scan_vector(self.s.scan, spacing_mm, row) for spacing_mm, row in rows])
        return Prepared(lambda index, number, copy: vectors[index])

    def hidden(self, part: Tensor) -> Tensor:
        """Return the numbers as they are."""
        return part

    def number_names(self, asked: Asked) -> Sequence[str]:
        """Return the names of the regions."""
        return [name for name in self.s.scan.inputs if name != "spacing"]

    def from_command_line(self, asked: Asked, has_cases: bool) -> Callable[[Sample], Tensor]:
        """Return the numbers of each sample, with the regions that are asked for or those of all training volumes."""
        s = self.s.scan
        missing = next((name for name in COLUMNS if name not in asked.numbers), None)
        if s.table is not None and missing is not None:
            raise UserError(
                f"--number: {missing} is not given, and the run was trained with one for each volume; allowed: "
                f"{', '.join(REGIONS)}; add --number {missing}={REGIONS[1]} or another"
            )
        names = [name for name in self.number_names(asked) if name in asked.numbers]
        words = {name: _check_choice(name, asked.numbers[name], REGIONS, ", ".join(REGIONS)) for name in names}
        return lambda sample: torch.tensor(scan_vector(s, sample.spacing_mm, words))


def scan_vector(s: ScanSettings, spacing_mm: Sequence[float], regions: Mapping[str, str]) -> list[float]:
    """Return the numbers of one scan in the order of the U-Net's inputs; `regions` has those that differ by scan."""
    shared = dict(zip(COLUMNS, s.regions, strict=True)) if isinstance(s.regions, tuple) else {}
    words = {**shared, **regions}
    vector: list[float] = []
    for name in s.inputs:
        if name == "spacing":
            vector += [UNIT * float(mm) for mm in spacing_mm]
        else:
            vector += [UNIT * (words[name] == region) for region in REGIONS]
    return vector


def _check_choice(name: str, text: str, allowed: Collection[str], choices: str) -> str:
    """Return a text of --number; raise `UserError` if it is not allowed."""
    if text not in allowed:
        raise UserError(f"--number: {name}={printable(text)}; allowed for {name}: {choices}; choose one of these")
    return text
