"""The source of the volumes and their preprocessing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from settings.section import FREE, SAME, WITHOUT_NUL, PathText, Section, Triple, TripleMm, key, section

Workers = Annotated[int, Field(ge=0, le=256)]


class IntensitySettings(Section):
    """The linear map from a volume's intensities to the network's range."""

    mode: Literal["percentile", "window"] = key("percentile", "Percentiles of each volume, or a fixed window.")
    lower: float = key(0.5, "Percentile or intensity mapped to the lower end.")
    upper: float = key(99.5, "Percentile or intensity mapped to the upper end.")


class DataSettings(Section):
    """The `data` section."""

    source: PathText = key(
        "phantoms",
        "A folder of volumes, an MSD-style dataset.json, or phantoms for generated volumes; a run resumes from another "
        "place if the volumes are the same.",
        FREE,
    )
    num_phantoms: int = key(48, "Number of volumes to generate if the source is phantoms.", ge=2, le=100_000)
    labels: PathText | None = key(
        None, "A CSV file with columns file,label; null: labels come from dataset.json or folder names."
    )
    group_by: Annotated[str, Field(min_length=1, max_length=1000, pattern=WITHOUT_NUL)] | None = key(
        None,
        "How to tell which volumes belong to one patient, so that the split keeps them together: folder, column:NAME "
        "of data.labels, or a regular expression found in the file name; null: split volumes one by one.",
    )
    label_maps: bool = key(False, "Also train on files that look like label maps.", FREE)
    frame: Annotated[int, Field(ge=0, lt=2**31)] | None = key(
        None, "Which volume of a 4D file to read, counted from 0; null: the fourth axis holds channels."
    )
    allow_outside_root: bool = key(False, "Allow dataset.json to name files outside its folder.", FREE)
    orientation: str = key("RAS", "Axis codes that each volume is reoriented to.", pattern=r"^[RL][AP][SI]$")
    spacing: TripleMm | None = key(None, "Spacing to resample to first, in mm; null: keep each volume's spacing.")
    voxel_size: Triple = key((256, 256, 64), "Grid that each volume is resized to, in voxels.")
    resize: Literal["resample", "crop_or_pad"] = key("resample", "How volumes are resized to the grid.")
    intensity: IntensitySettings = section(IntensitySettings, "Intensity scaling.")
    patch_size: Triple | None = key(None, "Train on random crops of this size; null: on whole volumes.")
    val_fraction: float = key(0.1, "Fraction of the volumes held out for validation.", gt=0, lt=1)
    use_augmentation: bool = key(False, "Random flips, small rotations, scaling and intensity changes.")
    prepared: Literal["disk", "memory", "none"] = key(
        "disk",
        "Where volumes are kept once they are on the grid: in files that all runs share, in host memory, or nowhere, "
        "so that each use reads the source again. The older key cache_rate is still read; above 0 it means memory.",
        SAME,
    )
    num_workers: Workers | Literal["auto"] = key(
        "auto",
        "Worker processes for loading; 0: load in the training process; auto: chosen from how long a sample takes.",
        SAME,
    )
    prefetch_factor: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = key(
        "auto", "Micro-batches that each worker loads ahead; auto: its share of one update, plus one.", SAME
    )
    pin_memory: bool | Literal["auto"] = key(
        "auto", "Page-locked host memory: faster copies to the GPU, more host memory; auto: if there is a GPU.", SAME
    )
    persistent_workers: bool = key(False, "Keep the workers alive between validations.", SAME)

    @model_validator(mode="before")
    @classmethod
    def _read_older_keys(cls, values: Any) -> Any:
        """Translate `cache_rate` of older configs; an invalid value stays, so that it is reported."""
        rate = values.get("cache_rate") if isinstance(values, dict) else None
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            return values
        older = {"prepared": "memory"} if rate > 0 else {}
        return older | {name: value for name, value in values.items() if name != "cache_rate"}

    @property
    def training_grid(self) -> tuple[int, ...]:
        """Return the grid of a training step: a patch or a whole volume."""
        return self.patch_size or self.voxel_size
