"""What MAISI's U-Net is told of a scan, as the numbers that it takes: spacing, body regions and modality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.formats import read_header
from data.geometry import geometry_of
from data.volumes import VolumeFile
from diffusion.conditioning.condition import Condition
from runtime.files.names import printable
from settings import DataSettings, UserError
from settings.conditioning.scan import REGIONS, ScanSettings

UNIT = 100.0
"""MAISI was trained with spacing in hundredths of a millimetre, and with 100 in the place of a region."""

MODALITY = "modality"


def scan_vector(s: ScanSettings, spacing_mm: Sequence[float], regions: Mapping[str, str]) -> list[float]:
    """Return the numbers of one scan in the order of the U-Net's inputs; `regions` has those that differ by scan."""
    words = {**s.region_words, **regions}
    vector: list[float] = []
    for name in s.inputs:
        if name == "spacing":
            vector += [UNIT * float(mm) for mm in spacing_mm]
        else:
            vector += [UNIT * (words[name] == region) for region in REGIONS]
    return vector


def scan_vectors(
    s: ScanSettings, data: DataSettings, files: Sequence[VolumeFile], rows: Sequence[Mapping[str, str]]
) -> Tensor | None:
    """Return the numbers of all volumes (N, M), or None if the U-Net takes none; without a table `rows` is empty."""
    if not s.width:
        return None
    spacings = [geometry_of(read_header(file.path), data).spacing_mm.tolist() for file in files]
    found = zip(spacings, rows or [{}] * len(files), strict=True)
    return torch.tensor([scan_vector(s, spacing_mm, row) for spacing_mm, row in found], dtype=torch.float32)


@dataclass(frozen=True)
class GivenScan:
    """What a command says of the samples' scans: their regions and their modality."""

    settings: ScanSettings
    regions: Mapping[str, str]
    modality: int

    def told(self, condition: Condition, spacings_mm: Sequence[Sequence[float]]) -> Condition:
        """Return the condition of samples on grids of these spacings, with what is said of their scans."""
        classes, scan = condition.classes, None
        if self.settings.num_modalities:
            classes = torch.full((len(spacings_mm),), self.modality)
        if self.settings.width:
            scan = torch.tensor([scan_vector(self.settings, mm, self.regions) for mm in spacings_mm])
        return replace(condition, classes=classes, scan=scan)


def given_scan(asked: Sequence[str], s: ScanSettings) -> tuple[GivenScan, list[str]]:
    """Take top_region, bottom_region and modality from texts such as modality=3; return them and the other texts.

    What is not said is as the run was configured. Raises `UserError` for a region that neither of the two says.
    """
    words: dict[str, str] = {}
    others: list[str] = []
    allowed: dict[str, tuple[str, ...]] = {
        name: REGIONS for name in ("top_region", "bottom_region") if name in s.inputs
    }
    if s.num_modalities:
        allowed[MODALITY] = tuple(map(str, range(s.num_modalities)))
    for text in asked:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in allowed or name in words:
            others.append(text)
        elif value not in allowed[name]:
            choices = f"0 to {s.num_modalities - 1}" if name == MODALITY else ", ".join(REGIONS)
            raise UserError(f"--number: {printable(text)}; allowed for {name}: {choices}; choose one of these")
        else:
            words[name] = value
    missing = next((name for name in s.columns if name not in words), None)
    if missing is not None:
        raise UserError(
            f"--number: {missing} is not given, and the run was trained with one for each volume; allowed: "
            f"{', '.join(REGIONS)}; add --number {missing}={REGIONS[1]} or another"
        )
    modality = int(words.pop(MODALITY, s.modality or 0))
    return GivenScan(s, words, modality), others
