"""The Python API, `import lean3d`: trained runs, prepared volumes and predictions, for notebooks and other programs."""

from __future__ import annotations

import functools
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from data import prepare_volumes
from data.formats import write_nifti
from data.loading import LoadedVolume, load_file, load_volume, restore, to_unit
from diffusion.conditioning.command_line import AskedConditions
from diffusion.conditioning.kind import Asked
from diffusion.sampling import VolumeSampler
from evaluation.trained_run import TrainedRun, check_finite
from memory.kernels.gpus import chosen_gpu
from memory.ladder.rungs import Order
from memory.ladder.walk import Ladder, walk
from memory.predict.prediction import GIB, Prediction, Predictor, Stage
from memory.predict.step import sampling_batch
from memory.watch.calibration import corrected
from runtime.files import printable
from settings import UserError, load_settings

log = logging.getLogger(__name__)

MOST_AT_ONCE = 16
"""Larger batches of samples are hardly faster, and the first volume comes later."""


@dataclass(frozen=True)
class Volume:
    """Voxels, float32 (C, X, Y, Z), with the affine (RAS+, millimetres) of their indices and, of a file, its name."""

    voxels: np.ndarray
    affine: np.ndarray
    name: str = ""

    @classmethod
    def of(
        cls, voxels: np.ndarray | Tensor, affine: np.ndarray | None = None, spacing_mm: Sequence[float] = (1, 1, 1)
    ) -> Volume:
        """Take an array or a tensor, (X, Y, Z) or (C, X, Y, Z), with its affine or, without one, its spacing."""
        if isinstance(voxels, Tensor):
            voxels = voxels.detach().cpu()
            voxels = voxels.float() if voxels.is_floating_point() else voxels  # numpy has no bfloat16
        array = np.asarray(voxels)
        if affine is None:
            is_spacing = np.shape(spacing_mm) == (3,) and all(0 < step < math.inf for step in spacing_mm)
            _check("spacing_mm", spacing_mm, is_spacing, "three numbers above 0, in millimetres")
            affine = np.diag([*spacing_mm, 1.0])
        return cls(array[None] if array.ndim == 3 else array, affine)

    def __post_init__(self) -> None:
        voxels, affine = np.asarray(self.voxels), np.asarray(self.affine)
        is_volume = voxels.ndim == 4 and voxels.dtype.kind in "biuf"
        allowed = "(C, X, Y, Z) of integers or real numbers; Volume.of takes (X, Y, Z) too"
        _check("voxels", f"shape {voxels.shape} and type {voxels.dtype}", is_volume, allowed)
        is_place = affine.shape == (4, 4) and affine.dtype.kind in "biuf" and bool(np.isfinite(affine).all())
        is_place = is_place and np.linalg.matrix_rank(affine[:3, :3]) == 3
        _check("affine", affine.tolist(), is_place, "4 x 4 finite numbers with an inverse")
        with np.errstate(over="ignore"):  # infinite voxels are refused where they are used
            object.__setattr__(self, "voxels", voxels.astype(np.float32, copy=False))
        object.__setattr__(self, "affine", affine.astype(np.float64))

    @property
    def spacing_mm(self) -> tuple[float, ...]:
        """Return the distance between neighbouring voxels along each axis."""
        return tuple(np.linalg.norm(self.affine[:3, :3], axis=0).tolist())

    def save(self, path: str | Path) -> None:
        """Write a .nii or .nii.gz file."""
        _check("path", printable(path), str(path).lower().endswith((".nii", ".nii.gz")), "endings .nii and .nii.gz")
        write_nifti(Path(path), self.voxels, self.affine)


@dataclass(frozen=True)
class DrawnSample:
    """A sample, and what a picture of it shows: a (D, H, W) volume in [0, 1], its spacing, and a voxel or None."""

    volume: Volume
    shown: tuple[Tensor, Sequence[float], Sequence[int] | None]


class Drawing:
    """Samples that are asked for: `num` of each case in the given files, or without files 8 or `num` in all.

    Raises `UserError` at once for what does not go with the run. `files` are as in `AskedConditions`, by option.
    """

    def __init__(
        self,
        trained: TrainedRun,
        num: int | None = None,
        seed: int = 0,
        steps: int | None = None,
        guidance_scale: float | None = None,
        class_name: str | None = None,
        files: Mapping[str, str] | None = None,
        numbers: Sequence[str] = (),
        batch_size: int | None = None,
    ) -> None:
        whole = (("num", num, 1), ("seed", seed, 0), ("steps", steps, 1), ("batch_size", batch_size, 1))
        for name, value, smallest in whole:
            is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= smallest
            _check(name, value, value is None or is_whole, f"whole numbers from {smallest}")
        is_finite = guidance_scale is None or math.isfinite(guidance_scale)
        _check("guidance_scale", guidance_scale, is_finite, "finite numbers")
        self.settings = trained.sampling_settings(steps, guidance_scale)
        network, self.frame = trained.unet()
        codec = trained.codec()
        asked = Asked(self.settings, self.frame.conditions, self.frame.class_names, class_name, files or {})
        self._conditions = AskedConditions(asked, numbers, codec)
        self.cases = self._conditions.cases
        self.num = num or (1 if self.cases else 8)
        self.total = self.num * max(1, len(self.cases))
        at_once = batch_size
        if at_once is None:
            most, is_cuda = min(self.total, MOST_AT_ONCE), codec.precision.device.type == "cuda"
            at_once = 1 if most == 1 else sampling_batch(self.settings, is_cuda, codec.available_bytes(), most)
            log.info("sampling in batches of %d", at_once)
        self._sampler = VolumeSampler(network, codec, self.settings, self.frame.normalisation, seed, at_once)
        self.num_steps = -(-self.total // at_once) * self.settings.ldm.sampling.num_inference_steps

    def draw(
        self,
        on_step: Callable[[], object] = lambda: None,
        name_of: Callable[[int], str] = "sample {}".format,
    ) -> Iterator[DrawnSample]:
        """Yield the samples; `on_step` is called `num_steps` times, `name_of` names a sample in an error."""
        frame, num = self.frame, self.num
        condition_of = functools.partial(self._conditions.batch, num=num, spacing_mm=frame.spacing_mm)
        for number, volume in enumerate(self._sampler.draw(range(self.total), condition_of, on_step)):
            unit = to_unit(check_finite(volume, name_of(number))).cpu()
            if self.cases:
                space = self.cases[number // num].space
                voxels = space.restored(unit.numpy(), frame.lower, frame.upper)
                shown = space.shown(voxels, frame.lower, frame.upper)
                yield DrawnSample(Volume(voxels, space.geometry.affine), shown)
            else:
                drawn = Volume(frame.intensities(unit.numpy()), frame.affine(self.settings))
                yield DrawnSample(drawn, (unit[0], frame.spacing_mm, None))


class Run:
    """A trained run: `open_run` opens one; encode and decode need stage 1, sample needs both stages."""

    def __init__(self, trained: TrainedRun) -> None:
        self.trained = trained
        self.settings = trained.settings

    @functools.cached_property
    def _codec(self) -> Any:
        return self.trained.codec()

    def encode(self, volume: Volume | str | Path) -> Tensor:
        """Return the latent, (C, d, h, w) on the CPU, of a file or a volume in memory."""
        return self._codec.encode(self._loaded(volume).image).cpu()

    def decode(self, latent: Tensor) -> Tensor:
        """Return the volume of a latent, (C, D, H, W) on the CPU, on the run's grid and in [0, 1]."""
        shape, is_tensor = tuple(self.settings.latent_shape), isinstance(latent, Tensor)
        found = f"{latent.dtype}, {tuple(latent.shape)}" if is_tensor else type(latent).__name__
        is_latent = is_tensor and tuple(latent.shape) == shape and latent.is_floating_point()
        _check("latent", found, is_latent, f"one tensor of real numbers, {shape}")
        return to_unit(check_finite(self._codec.decode(latent.float()), "decode")).cpu()

    def reconstruct(self, volume: Volume | str | Path) -> Volume:
        """Encode and decode; return the result on the volume's own grid, in its own intensities."""
        return self.reconstructed(volume)[0]

    def reconstructed(self, volume: Volume | str | Path) -> tuple[Volume, Tensor, Tensor]:
        """Return what `reconstruct` returns, and input and output on the run's grid, in the network's range."""
        loaded = self._loaded(volume)
        name = "the volume" if isinstance(volume, Volume) else printable(volume)
        output = check_finite(self._codec.decode(self._codec.encode(loaded.image)), name)
        return Volume(*restore(output, loaded)), loaded.image, output

    def sample(
        self,
        num: int | None = None,
        *,
        seed: int = 0,
        steps: int | None = None,
        guidance_scale: float | None = None,
        class_name: str | None = None,
        labels: str | None = None,
        condition: str | None = None,
        mask: str | None = None,
        numbers: Mapping[str, object] | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Volume]:
        """Yield samples, the same as `scripts/sample.py` writes for these options."""
        given = {"--labels": labels, "--condition": condition, "--mask": mask}
        files = {option: place for option, place in given.items() if place is not None}
        texts = [f"{name}={value}" for name, value in (numbers or {}).items()]
        drawing = Drawing(
            self.trained, num, seed, steps, guidance_scale, class_name, files, numbers=texts, batch_size=batch_size
        )
        return (sample.volume for sample in drawing.draw())

    def _loaded(self, volume: Volume | str | Path) -> LoadedVolume:
        data, channels = self.settings.data, self.settings.autoencoder.in_channels
        if isinstance(volume, str | Path):
            return load_volume(volume, data, channels)
        is_volume = isinstance(volume, Volume)
        _check("volume", type(volume).__name__, is_volume, "a path or a Volume; Volume.of makes one of an array")
        # Through a file, so that arrays take the same way to the network as volumes on disk.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "volume.nii"
            volume.save(path)
            try:
                return load_volume(path, data, channels)
            except UserError as error:
                raise UserError(str(error).replace(str(path), "the volume")) from error


def open_run(
    path: str | Path, *, best: Literal["autoencoder", "ldm"] | None = None, budget_gb: float | None = None
) -> Run:
    """Open the folder of a run, finished or not; `best` takes a stage's weights of its best validation."""
    _check_choice("best", best, (None, "autoencoder", "ldm"))
    _check_budget(budget_gb)
    return Run(TrainedRun(path, budget_gb, best))


def prepared_volumes(config: str | Path, *overrides: str, part: Literal["train", "val"] = "train") -> Iterator[Volume]:
    """Yield the volumes that a config trains on or validates with, on its grid and in [0, 1]."""
    _check_choice("part", part, ("train", "val"))
    settings = load_settings(config, overrides)
    split = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
    for file in getattr(split, part):
        loaded = load_file(file, settings.data)
        yield Volume(to_unit(loaded.image).numpy(), loaded.geometry.grid_affine, file.name)


def predict_memory(
    config: str | Path, *overrides: str, stage: Stage = "autoencoder", gpu: str | None = None
) -> Prediction:
    """Predict memory and work of one training step; `required_bytes` is what the GPU must have."""
    _check_choice("stage", stage, get_args(Stage))
    settings = load_settings(config, overrides, stage=stage)
    with Predictor(without_triton=chosen_gpu(gpu).without_triton) as predictor:
        return corrected(predictor.submit(settings, stage).result(), gpu)


def walk_ladder(
    config: str | Path,
    *overrides: str,
    budget_gb: float,
    stage: Stage = "autoencoder",
    gpu: str | None = None,
    order: Order = "lossless-first",
) -> Ladder:
    """Find what to change so that a config fits; `recommended` is None if nothing does."""
    _check_choice("stage", stage, get_args(Stage))
    _check_choice("order", order, get_args(Order))
    _check_budget(budget_gb)
    settings = load_settings(config, overrides, stage=stage)
    correct = functools.partial(corrected, gpu_name=gpu)
    return walk(settings, stage, round(budget_gb * GIB), order, None, correct, chosen_gpu(gpu))


def _check(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise UserError(f"{name}: found {value}; allowed: {allowed}")


def _check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    _check(name, repr(value), value in allowed, ", ".join(map(repr, allowed)))


def _check_budget(budget_gb: float | None) -> None:
    is_budget = budget_gb is None or 0 < budget_gb < math.inf
    _check("budget_gb", budget_gb, is_budget, "finite numbers above 0, the memory of the GPU in GiB")
