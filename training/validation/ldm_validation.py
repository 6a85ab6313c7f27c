"""Validation of stage 2: loss and skill on held-out latents, and samples from fixed seeds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from data import DataSplit, VolumeFile
from data.loading import from_unit, load_file, load_volume, to_unit
from diffusion.latents import Latents
from diffusion.sampling import VolumeSampler
from settings import DataSettings
from settings.ldm import NUM_PREVIEWS
from training.ldm_step import LatentDiffusionStep
from training.validation.metrics import nearest, summary_vector
from training.validation.previews import MAX_COPIES, Preview, Row, ViewerVolume, picture_of
from training.validation.skill import Skill, skill_in_words

log = logging.getLogger(__name__)


MAX_COMPARED = 64
"""How many training volumes the samples of a validation are compared with; scripts/evaluate.py compares all."""

MAX_SHOWN = 2 * MAX_COPIES
"""How many held-out volumes are shown: one row beside the samples, and one beside their nearest training volumes."""


class RealVolumes:
    """Reads held-out and training volumes on first use, and keeps what it needs of them."""

    def __init__(self, volumes: DataSplit, data: DataSettings) -> None:
        train = volumes.train
        chosen = min(len(train), MAX_COMPARED)
        self._train = [train[number * len(train) // chosen] for number in range(chosen)]
        self._num_training = len(train)
        self._val, self._data, self._class_names = volumes.val[:MAX_SHOWN], data, volumes.class_names

    @functools.cached_property
    def held_out(self) -> list[ViewerVolume]:
        """Return the first held-out volumes, as the report shows them."""
        return [self._shown(file, place) for place, file in enumerate(self._val)]

    @functools.cached_property
    def _vectors(self) -> Tensor:
        images = (load_volume(file.path, self._data, file.num_channels).image for file in self._train)
        return torch.stack([summary_vector(to_unit(image)) for image in images])

    def nearest_to(self, samples: Sequence[Tensor]) -> list[ViewerVolume]:
        """Return the training volume nearest to each (C, D, H, W) sample in [0, 1]."""
        vectors = torch.stack([summary_vector(sample) for sample in samples])
        distances, indices = nearest(vectors, self._vectors)
        among = f"nearest of {len(self._train)}"
        if len(self._train) < self._num_training:
            among += f" of {self._num_training}"
        notes = [f"{among} training volumes, distance {distance:.3f}" for distance in distances.tolist()]
        return [
            self._shown(self._train[index], place, note)
            for place, (index, note) in enumerate(zip(indices.tolist(), notes, strict=True))
        ]

    def _shown(self, file: VolumeFile, place: int, note: str = "") -> ViewerVolume:
        loaded = load_volume(file.path, self._data, file.num_channels)
        if self._class_names and file.label is not None:
            note = ", ".join(part for part in (f"class {self._class_names[file.label]}", note) if part)
        spacing_mm = tuple(map(float, loaded.geometry.spacing_mm))
        return ViewerVolume.of(loaded.image, spacing_mm, file.name, note, place)


class LdmValidation:
    """Validates a stage 2: the loss and the skill on held-out latents, and a preview of samples.

    `real` gives the real volumes that the preview puts beside the samples. Every call uses the same latents, times,
    noise and seeds, and the averaged weights if there are any.
    """

    def __init__(self, step: LatentDiffusionStep, latents: Latents, real: RealVolumes | None = None) -> None:
        self.step, self.latents, self.real = step, latents, real
        self.skill = Skill(latents, step.codec, step.normalisation, step.settings, step.process)
        self.last_skill: float | None = None

    def __call__(self) -> tuple[dict[str, float], Preview | None]:
        """Return the metrics over all ranks and, on rank zero, a preview of samples."""
        step = self.step
        step.unet.eval()
        with step.inference_weights():
            metrics = self.skill(step.unet)
            preview = sample_preview(step, self.latents, self.real) if step.process.is_rank_zero else None
        step.unet.train()
        self.last_skill = metrics.get("val_skill")
        return metrics, preview

    def log_skill(self) -> None:
        """Log in words what the skill of the last validation says, if it was measured."""
        if self.last_skill is not None:
            log.info(skill_in_words(self.last_skill, self.step.settings.ldm.conditioning.volume.has_hole))


def sample_preview(step: LatentDiffusionStep, latents: Latents, real: RealVolumes | None = None) -> Preview:
    """Draw the preview samples, always from the same seeds; the picture has one row per sample.

    A sample that has the conditions of a held-out volume is shown as users get it, with what its condition knows of
    that volume, and beside its conditions and the volume.
    """
    settings, conditioning, store = step.settings, step.settings.ldm.conditioning, latents.conditions
    sampler = VolumeSampler(
        step.unet, step.codec, settings, step.normalisation, settings.seed, step.training.batch_size
    )
    condition_of = latents.held_out_condition if conditioning.comes_from_volumes else None
    others = latents.volumes.val or latents.volumes.train  # conditions need the former
    rows, samples = [], []
    shown: dict[str, ViewerVolume] = {}
    for place, drawn in enumerate(sampler.draw(range(NUM_PREVIEWS), condition_of)):
        volume, name, words = drawn, f"sample {place + 1}", []
        file = others[place % len(others)]
        known = None if store is None else store.known(latents.held_out_index(place))
        if known is not None:
            volume = known.kept_in(drawn.cpu(), load_file(file, latents.settings).image)
        if conditioning.type == "class":
            number, names = place % conditioning.num_classes, latents.volumes.class_names
            number = file.label or 0 if conditioning.comes_from_volumes else number
            words.append(f"class {names[number] if number < len(names) else number}")
        if conditioning.describes_volumes:
            words.append(f"conditions of {file.name}")
        rows.append(Row.of(", ".join([name, *words]), to_unit(volume[0]).cpu(), latents.spacing_mm))
        shown[f"sample_{place}"] = ViewerVolume.of(volume, latents.spacing_mm, name, ", ".join(words), place)
        samples.append(to_unit(volume).cpu())
        if conditioning.describes_volumes:
            assert store is not None, "without partners a sample has no target"
            beside = [
                (kind.replace(" ", ""), f"{'condition volume' if kind == 'volume' else kind} of {file.name}", picture)
                for kind, picture in store.pictures(latents.held_out_index(place)).items()
            ]
            target = to_unit(load_file(file, latents.settings).image[0])
            for role, label, voxels in [*beside, ("target", f"{file.name}, real", target)]:
                factors = (n / m for n, m in zip(latents.settings.voxel_size, voxels.shape, strict=True))
                spacing_mm = tuple(mm * factor for mm, factor in zip(latents.spacing_mm, factors, strict=True))
                rows.append(Row.of(label, voxels, spacing_mm))
                shown[f"{role}_{place}"] = ViewerVolume.of(from_unit(voxels[None]), spacing_mm, label, place=place)
    if real is not None:
        shown |= {f"nearest_{place}": volume for place, volume in enumerate(real.nearest_to(samples))}
        shown |= {f"real_{place}": volume for place, volume in enumerate(real.held_out)}
    return Preview(picture_of(rows), shown)
