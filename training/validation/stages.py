"""Validation of both stages: reconstructions of held-out volumes, loss and skill on held-out latents, and previews."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from data import DataSplit, VolumeFile
from data.batches import Batch
from data.formats import read_header
from data.geometry import geometry_of
from data.loading import from_unit, load_file, load_volume, to_unit
from diffusion.latents import Latents
from diffusion.sampling import VolumeSampler
from models.bottleneck import code_use
from settings import DataSettings
from settings.ldm import NUM_PREVIEWS
from training.autoencoder_step import AutoencoderStep
from training.ldm_step import LatentDiffusionStep
from training.validation.metrics import OCCUPANCY, absolute_error, nearest, psnr, ssim, summary_vector
from training.validation.previews import MAX_COPIES, Preview, Row, ViewerVolume, picture_of, reconstruction_rows
from training.validation.skill import Skill, skill_in_words

log = logging.getLogger(__name__)

_MEASURES = {"psnr": psnr, "ssim": ssim, "l1": absolute_error}

MAX_COMPARED = 64
"""How many training volumes the samples of a validation are compared with; scripts/evaluate.py compares all."""

MAX_SHOWN = 2 * MAX_COPIES
"""How many held-out volumes are shown: one row beside the samples, and one beside their nearest training volumes."""


@torch.no_grad()
def validate_autoencoder(
    step: AutoencoderStep, batches: Iterable[Batch], files: Sequence[VolumeFile] = ()
) -> tuple[dict[str, float], Preview | None]:
    """Return mean PSNR, SSIM and absolute error over all processes, and a preview of this process's first volumes.

    With a quantiser, also how its codes are used over all held-out volumes; of volumes that are mostly empty, also IoU
    and Chamfer distance.
    `files` are the held-out volumes that the positions of the batches index; the preview takes their spacing.
    Decode the mean of the latent distribution, with the averaged weights if there are any. Volumes larger than the
    training patches run in slabs.
    """
    threshold, quantiser = step.training.occupancy_threshold, step.autoencoder.quantiser
    names = [*_MEASURES, "count", *(OCCUPANCY if threshold is not None else [])]
    totals = torch.zeros(len(names), dtype=torch.float64)
    counts = None if quantiser is None else torch.zeros(quantiser.num_codes, dtype=torch.float64)
    rows: list[Row] = []
    shown: dict[str, ViewerVolume] = {}
    network = step.autoencoder.eval()
    with step.inference_weights():
        for batch in batches:
            image = batch.image.to(step.process.device, non_blocking=True)
            reconstruction, values = reconstruct_and_measure(step, image, counts)
            if threshold is not None:
                occupied = [measure(reconstruction, image, threshold).double().sum() for measure in OCCUPANCY.values()]
                values = torch.stack([*values, *occupied])
            totals += values.cpu()
            if (place := len(shown) // 2) < MAX_COPIES:
                name, pair = batch.files[0], {"input": image[0], "reconstruction": reconstruction[0]}
                spacing = spacing_of(files[batch.positions[0]], step.settings.data) if files else (1.0, 1.0, 1.0)
                rows = rows or reconstruction_rows(name, image[0], reconstruction[0], spacing)
                shown |= {f"{r}_{place}": ViewerVolume.of(v, spacing, name, place=place) for r, v in pair.items()}
    network.train()
    sums = dict(zip(names, step.process.sum(totals).tolist(), strict=True))
    count = sums.pop("count")
    if not count:  # a data set of one volume has no held-out volumes
        return {}, None
    means = {f"val_{name}": value / count for name, value in sums.items()}
    if counts is not None:
        means |= {f"val_{name}": float(value) for name, value in code_use(step.process.sum(counts)).items()}
    return means, Preview(picture_of(rows), shown) if rows else None


def reconstruct_and_measure(
    step: AutoencoderStep, image: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the reconstructions of a batch, and its sums of PSNR, SSIM, absolute error and number of volumes.

    Add how often each code occurs to `counts`, a tensor of the host, if given.
    """
    volumes = []
    for volume in image:
        latent = step.codec.encode(volume)
        if step.autoencoder.quantiser is not None and counts is not None:
            codes = step.autoencoder.quantiser.codes(latent[None]).flatten().cpu()
            counts.index_add_(0, codes, torch.ones_like(codes, dtype=counts.dtype))
        volumes.append(step.codec.decode(latent))
    reconstruction = torch.stack(volumes)
    values = [measure(reconstruction, image) for measure in _MEASURES.values()]
    return reconstruction, torch.stack([value.double().sum() for value in (*values, torch.ones_like(values[0]))])


def spacing_of(file: VolumeFile, data: DataSettings) -> tuple[float, ...]:
    """Return the distance between neighbouring voxels, in mm, once a volume is on the network's grid."""
    return tuple(map(float, geometry_of(read_header(file.path), data).spacing_mm))


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
        of = f" of {self._num_training}" if len(self._train) < self._num_training else ""
        among = f"nearest of {len(self._train)}{of} training volumes"
        pairs = enumerate(zip(indices.tolist(), distances.tolist(), strict=True))
        return [self._shown(self._train[i], place, f"{among}, distance {far:.3f}") for place, (i, far) in pairs]

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
        known = store.known(latents.held_out_index(place)) if conditioning.comes_from_volumes else None
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
            conditions = [
                (kind.replace(" ", ""), f"{'condition volume' if kind == 'volume' else kind} of {file.name}", picture)
                for kind, picture in store.pictures(latents.held_out_index(place)).items()
            ]
            target = to_unit(load_file(file, latents.settings).image[0])
            for role, label, voxels in [*conditions, ("target", f"{file.name}, real", target)]:
                factors = (n / m for n, m in zip(latents.settings.voxel_size, voxels.shape, strict=True))
                spacing_mm = tuple(mm * factor for mm, factor in zip(latents.spacing_mm, factors, strict=True))
                rows.append(Row.of(label, voxels, spacing_mm))
                shown[f"{role}_{place}"] = ViewerVolume.of(from_unit(voxels[None]), spacing_mm, label, place=place)
    if real is not None:
        shown |= {f"nearest_{place}": volume for place, volume in enumerate(real.nearest_to(samples))}
        shown |= {f"real_{place}": volume for place, volume in enumerate(real.held_out)}
    return Preview(picture_of(rows), shown)
