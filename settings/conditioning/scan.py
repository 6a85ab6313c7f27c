"""The keys of `ldm.conditioning.scan`: what MAISI's U-Net takes of a scan besides its image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from settings.conditioning.section import ConditionSection, Found
from settings.errors import Problem
from settings.section import PathText, key

if TYPE_CHECKING:
    from settings.root import Settings

SCAN = "ldm.conditioning.scan"

REGIONS = ("head", "chest", "abdomen", "pelvis")
"""The body regions that MAISI tells apart, in the order of its code."""

WIDTHS = {"top_region": len(REGIONS), "bottom_region": len(REGIONS), "spacing": 3}
"""The inputs in the order in which MAISI concatenates their embeddings, with the numbers that each takes."""

COLUMNS = ("top_region", "bottom_region")
"""The columns of a table of regions, named as the inputs."""

NUM_MODALITIES = 128
"""The modalities that MAISI's U-Net tells apart."""

UNKNOWN_MODALITY = 0

Region = Literal["head", "chest", "abdomen", "pelvis"]
TopAndBottom = Annotated[tuple[Region, ...], Field(strict=False, min_length=2, max_length=2)]


class ScanSettings(ConditionSection):
    """Spacing, regions and modality of a scan, in MAISI's way: embeddings concatenated to that of the timestep."""

    regions: TopAndBottom | PathText | None = key(
        None,
        "Body regions at the upper and the lower end of all volumes, such as [chest, abdomen], or a CSV file with "
        "columns file, top_region and bottom_region; null: the U-Net has no such inputs.",
    )
    modality: Annotated[int, Field(ge=0, lt=NUM_MODALITIES)] | None = key(
        None,
        "The volumes' modality; MAISI's: 0 unknown, 1 CT, 2 without contrast, 3 with contrast, 8 MR, 9 T1, 10 T2; "
        "null: the U-Net has no such input. With regions or a modality it also takes the voxel spacing.",
    )

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on it."""
        return self.regions is not None or self.modality is not None

    @property
    def is_ever_hidden(self) -> bool:
        """Return whether training hides it: the modality, not the rest."""
        return self.modality is not None

    @property
    def describes_volume(self) -> bool:
        """Return False: it does not say what a volume looks like."""
        return False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that the U-Net has, in MAISI's order."""
        return tuple(name for name in WIDTHS if (self.is_used if name == "spacing" else self.regions is not None))

    @property
    def region_words(self) -> dict[str, str]:
        """Return the regions that all volumes share by the name of their input."""
        if self.regions is None or isinstance(self.regions, str):
            return {}
        return dict(zip(COLUMNS, self.regions, strict=True))

    @property
    def table(self) -> str | None:
        """Return the file with the regions of each volume, if they differ."""
        return self.regions if isinstance(self.regions, str) else None

    @property
    def width(self) -> int:
        """Return how many numbers the U-Net takes for all inputs together."""
        return sum(WIDTHS[name] for name in self.inputs)

    @property
    def num_modalities(self) -> int:
        """Return the number of modalities that the U-Net embeds, with the unknown one; 0: it takes none."""
        return 0 if self.modality is None else NUM_MODALITIES

    def problems(self, settings: Settings) -> Found:
        """Yield each problem with the keys."""
        if self.num_modalities and settings.ldm.conditioning.type == "class":
            found = f"{self.modality} with conditioning type class, which uses the same embedding"
            remedy = "set null, or type: none"
            yield Problem(f"{SCAN}.modality", found, "allowed: null", remedy), ("ldm.conditioning.type",)
