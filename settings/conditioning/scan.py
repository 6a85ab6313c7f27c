"""The keys of `ldm.conditioning.scan`: what MAISI's U-Net is told of a scan besides its image."""

from __future__ import annotations

from typing import Literal

from settings.section import FREE, PathText, Section, key

REGIONS = ("head", "chest", "abdomen", "pelvis")
"""The body regions that MAISI tells apart, in the order of its code."""

WIDTHS = {"top_region": len(REGIONS), "bottom_region": len(REGIONS), "spacing": 3}
"""The inputs in the order in which MAISI joins their embeddings, with the numbers that each takes."""

UNKNOWN_MODALITY = 0

TABLE = "table"
"""The region of volumes that have one each, in a table."""

Region = Literal["none", "head", "chest", "abdomen", "pelvis", "table"]


class ScanSettings(Section):
    """Spacing, body regions and modality of a scan, in MAISI's way: embeddings joined to that of the timestep."""

    spacing: bool = key(False, "Whether the U-Net is told the voxel spacing that each volume has on the grid.")
    top_region: Region = key(
        "none",
        "Body region at the upper end of all volumes; table: each has its own; none: the U-Net has no such input.",
    )
    bottom_region: Region = key("none", "Body region at the lower end of all volumes, in the same words.")
    table: PathText | None = key(
        None, "A CSV file with a column file and those of top_region and bottom_region that say table.", FREE
    )
    num_modalities: int = key(
        0,
        "Number of modalities that the U-Net can be told, 128 in MAISI's; number 0 is the unknown one; 0: not told.",
        ge=0,
        le=65_536,
    )
    modality: int = key(
        1, "The volumes' modality; MAISI's: 1 CT, 2 without contrast, 3 with contrast, 8 MR, 9 T1, 10 T2.", ge=0
    )
    dropout: float = key(0.1, "Fraction of modalities hidden in training; guidance needs it.", ge=0, lt=1)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that the U-Net has, in MAISI's order."""
        has = {"spacing": self.spacing, **{name: word != "none" for name, word in self.regions.items()}}
        return tuple(name for name in WIDTHS if has[name])

    @property
    def regions(self) -> dict[str, Region]:
        """Return the word of both regions by the name of their key."""
        return {"top_region": self.top_region, "bottom_region": self.bottom_region}

    @property
    def width(self) -> int:
        """Return how many numbers the U-Net takes for all inputs together."""
        return sum(WIDTHS[name] for name in self.inputs)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the table that are needed."""
        return tuple(name for name, word in self.regions.items() if word == TABLE)

    @property
    def is_used(self) -> bool:
        """Return whether the U-Net is told anything."""
        return self.width > 0 or self.num_modalities > 0
