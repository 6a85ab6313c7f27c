"""Where the volumes come from and how they are brought to the network's grid."""

from __future__ import annotations

from typing import Literal

from settings.section import FREE, SAME, PathText, Section, Triple, TripleMm, key, section


class IntensitySettings(Section):
    """The linear map from a volume's own intensities to the network's range."""

    mode: Literal["percentile", "window"] = key("percentile", "Percentiles of each volume, or a fixed window.")
    lower: float = key(0.5, "Percentile or intensity mapped to the lower end.")
    upper: float = key(99.5, "Percentile or intensity mapped to the upper end.")


class DataSettings(Section):
    """The `data` section."""

    source: PathText = key(
        "phantoms", "A folder of volumes, an MSD-style dataset.json, or phantoms: generated volumes."
    )
    num_phantoms: int = key(48, "How many phantoms are generated when the source is phantoms.", ge=2, le=100_000)
    labels: PathText | None = key(
        None, "A CSV of file,label; without it labels come from dataset.json or folder names."
    )
    allow_outside_root: bool = key(False, "Let dataset.json name files outside its own folder.", FREE)
    orientation: str = key("RAS", "Axis codes that each volume is turned to.", pattern=r"^[RL][AP][SI]$")
    spacing: TripleMm | None = key(None, "Millimetres per voxel to resample to first; null keeps each volume's own.")
    voxel_size: Triple = key((256, 256, 64), "The grid each volume is brought to.")
    resize: Literal["resample", "crop_or_pad"] = key("resample", "How a volume is brought to the grid.")
    intensity: IntensitySettings = section(IntensitySettings, "How intensities are scaled.")
    patch_size: Triple | None = key(None, "Random crops of this size for training instead of whole volumes.")
    val_fraction: float = key(0.1, "Share of the volumes held out for validation.", gt=0, lt=1)
    use_augmentation: bool = key(False, "Random flips, small rotations, scalings and intensity changes.")
    cache_rate: float = key(0.0, "Share of the volumes kept in host memory after loading.", SAME, ge=0, le=1)
    num_workers: int = key(1, "Processes that load volumes; 0: load in the training process.", SAME, ge=0, le=256)
    prefetch_factor: int = key(2, "Micro-batches that each worker prepares ahead.", SAME, ge=1, le=1024)
    pin_memory: bool = key(False, "Page-locked host memory: faster copies to the GPU, more host memory.", SAME)
    persistent_workers: bool = key(False, "Keep the workers alive between validations.", SAME)

    @property
    def training_grid(self) -> tuple[int, ...]:
        """Return the grid that a training step sees."""
        return self.patch_size or self.voxel_size
