"""Sample volumes from a trained run and write them as NIfTI files, with a montage of the first ones."""

from __future__ import annotations

import argparse
import functools
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import at_least, check_output_folder, parser, run
from runtime.files import counted, printable
from settings import Settings, UserError

if TYPE_CHECKING:
    from models.volume_codec import VolumeCodec

MOST_AT_ONCE = 16
"""Larger batches are hardly faster, and the first volume is written later."""
MOST_SHOWN = 64
"""Samples in the montage, which is one picture in memory."""

FILE_OPTIONS = {
    "--labels": "label maps; each sample lies in the space of its map",
    "--condition": "condition volumes; each sample lies in the space of its volume",
    "--mask": "masks, above 0 where the condition volumes are to be filled",
}

log = logging.getLogger("sample")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/sample.py --run runs/quickstart --num 4",
            "python scripts/sample.py --run runs/ct --num 8 --steps 100 --seed 7 --class lesion --out samples",
            "python scripts/sample.py --run runs/mr --labels maps/case_7.nii.gz --num 3",
        ],
    )
    result.add_argument(
        "--best", action="store_true", help="use the weights of the best validation (default: the last weights)"
    )
    result.add_argument("--run", required=True, metavar="DIR", help="folder of a run, finished or not")
    result.add_argument(
        "--num", type=at_least(1), help="number of volumes (default: 8), or for each condition (default: 1)"
    )
    result.add_argument("--steps", type=at_least(1), help="steps from noise to latent (default: as configured)")
    result.add_argument("--seed", type=at_least(0), default=0, help="seed of the volumes (default: 0)")
    result.add_argument(
        "--class",
        dest="class_name",
        metavar="NAME",
        help="class of all volumes (default: each class in turn, or none with --labels or --condition)",
    )
    for option, words in FILE_OPTIONS.items():
        result.add_argument(option, action="append", metavar="FILE_OR_FOLDER", help=words)
    result.add_argument(
        "--number",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a number or word of all volumes, such as age=63 or top_region=chest; may be repeated; others stay hidden",
    )
    result.add_argument(
        "--guidance-scale", type=at_least(0.0), help="values above 1 follow the conditions more closely"
    )
    result.add_argument(
        "--batch-size",
        type=at_least(1),
        help="volumes to sample at once; does not change them (default: as many as the memory has room for)",
    )
    result.add_argument(
        "--budget-gb",
        type=at_least(0.0),
        help="sample fewer at once and decode in slabs if more memory than this is needed (default: the free memory)",
    )
    result.add_argument("--out", metavar="DIR", help="folder for the volumes (default: samples in the run folder)")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Sample, decode and write the volumes one by one, then the montage."""
    from tqdm import tqdm

    from data import to_unit
    from data.formats import write_nifti
    from diffusion.conditioning.command_line import AskedConditions, title_of
    from diffusion.conditioning.kind import Asked
    from diffusion.sampling import VolumeSampler
    from evaluation.trained_run import TrainedRun, check_finite
    from training.validation.previews import Row, picture_of, save_picture

    trained = TrainedRun(options.run, options.budget_gb, best="ldm" if options.best else None)
    out = trained.folder.path / "samples" if options.out is None else Path(options.out)
    check_output_folder(out if options.out is None else options.out)
    settings = trained.sampling_settings(options.steps, options.guidance_scale)
    network, frame = trained.unet()
    codec = trained.codec()
    files = {option: _only(getattr(options, option[2:]), option) for option in FILE_OPTIONS}
    given = {option: place for option, place in files.items() if place is not None}
    asked = Asked(settings, frame.conditions, frame.class_names, options.class_name, given)
    conditions = AskedConditions(asked, options.number, codec)
    cases = conditions.cases
    num = options.num or (1 if cases else 8)
    total = num * max(1, len(cases))
    names = [case.name for case in cases] or ["sample"]
    paths = [out / f"{name}_{_title(options)}_{number:04d}.nii.gz" for name in names for number in range(num)]
    notes = [f"condition {cases[number // num].digest[:32]}" if cases else "" for number in range(total)]
    _check_paths(paths, notes)

    rows: list[Row] = []
    batch_size = options.batch_size or _batch_size(settings, codec, total)
    num_batches = -(-total // batch_size)
    with tqdm(total=num_batches * settings.ldm.sampling.num_inference_steps, desc="sampling", unit="step") as bar:
        sampler = VolumeSampler(network, codec, settings, frame.normalisation, options.seed, batch_size)
        condition_of = functools.partial(conditions.batch, num=num, spacing_mm=frame.spacing_mm)
        volumes = sampler.draw(range(total), condition_of, bar.update)
        for number, volume in enumerate(volumes):
            path, space = paths[number], cases[number // num].space if cases else None
            unit = to_unit(check_finite(volume, printable(path))).cpu()
            if space is None:
                write_nifti(path, frame.intensities(unit.numpy()), frame.affine(settings))
                row = Row.of(path.name, unit[0], frame.spacing_mm)
            else:
                voxels = space.restored(unit.numpy(), frame.lower, frame.upper)
                write_nifti(path, voxels, space.geometry.affine, notes[number])
                row = Row.of(path.name, *space.shown(voxels, frame.lower, frame.upper))
            if number < MOST_SHOWN:
                rows.append(row)
    picture = out / f"montage_{_title(options, title_of(given))}.png"
    shown = counted(total, "sample") if total <= MOST_SHOWN else f"the first {MOST_SHOWN} of {total:,} samples"
    save_picture(picture, picture_of(rows), f"{trained.settings.name}, {shown}")
    log.info("%s written to %s, montage %s", counted(total, "volume"), out, picture)
    log.info("next: python scripts/evaluate.py --run %s", shlex.quote(options.run))
    return 0


def _only(places: Sequence[str] | None, option: str) -> str | None:
    """Return what an option was given; raise `UserError` if it was given twice."""
    if places is None or len(places) == 1:
        return None if places is None else places[0]
    raise UserError(f"{option}: given {len(places)} times; once is allowed; put all the files into one folder")


def _check_paths(paths: Sequence[Path], notes: Sequence[str]) -> None:
    """Raise `UserError` before a sample of another condition is overwritten because both have the same name."""
    from data.formats import note_of

    for path, note in zip(paths, notes, strict=True):
        if path.exists() and note_of(path) != note:
            raise UserError(
                f"--out: {printable(path)} is the sample of another condition of that name; only the samples of the "
                "same files are replaced; choose another folder, or remove it"
            )


def _batch_size(settings: Settings, codec: VolumeCodec, total: int) -> int:
    """Return how many of the samples to draw at once."""
    if total == 1:
        return 1
    from memory.predict.run import sampling_batch

    is_cuda = codec.precision.device.type == "cuda"
    number = sampling_batch(settings, is_cuda, codec.available_bytes(), min(total, MOST_AT_ONCE))
    log.info("sampling in batches of %d", number)
    return number


def _title(options: argparse.Namespace, conditions: str | None = None) -> str:
    """Return the name of the conditions and all options of the samples, so that different ones never share a name."""
    parts = [*([] if conditions is None else [conditions]), f"seed{options.seed}", *(["best"] if options.best else [])]
    if options.class_name is not None:
        parts.append(options.class_name.replace("/", "%2F"))
    parts += [text.replace("/", "%2F") for text in options.number]
    if options.steps is not None:
        parts.append(f"steps{options.steps}")
    if options.guidance_scale is not None:
        parts.append(f"guidance{options.guidance_scale:g}")
    return "_".join(parts)


if __name__ == "__main__":
    sys.exit(run(main, parse()))
