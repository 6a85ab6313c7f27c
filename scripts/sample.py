"""Sample volumes from a trained run and write them as NIfTI files, with a montage of the first ones."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import ProgressBar, add_run_options, at_least, check_output_folder, parser, run
from runtime.files import counted, printable
from settings import UserError

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
    add_run_options(result, "--run", "--best", "--steps", "--guidance-scale", "--seed", "--budget-gb")
    text = "number of volumes (default: 8), or for each condition (default: 1)"
    result.add_argument("--num", type=at_least(1), help=text)
    text = "class of all volumes (default: each class in turn, or none with --labels or --condition)"
    result.add_argument("--class", dest="class_name", metavar="NAME", help=text)
    for option, words in FILE_OPTIONS.items():
        result.add_argument(option, action="append", metavar="FILE_OR_FOLDER", help=words)
    text = "a number or word of all volumes, such as age=63 or top_region=chest; may be repeated; others stay hidden"
    result.add_argument("--number", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "volumes to sample at once; does not change them (default: as many as the memory has room for)"
    result.add_argument("--batch-size", type=at_least(1), help=text)
    result.add_argument("--out", metavar="DIR", help="folder for the volumes (default: samples in the run folder)")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Sample, decode and write the volumes one by one, then the montage."""
    from data.formats import note_of, write_nifti
    from diffusion.conditioning.command_line import title_of
    from evaluation.api import Drawing
    from evaluation.trained_run import TrainedRun
    from training.validation.previews import Row, picture_of, save_picture

    trained = TrainedRun(options.run, options.budget_gb, best="ldm" if options.best else None)
    out = trained.folder.path / "samples" if options.out is None else Path(options.out)
    check_output_folder(out if options.out is None else options.out)
    places = {option: value for option in FILE_OPTIONS if (value := getattr(options, option[2:])) is not None}
    if twice := [option for option, value in places.items() if len(value) > 1]:
        raise UserError(f"{twice[0]}: given more than once; put all the files into one folder")
    given = {option: value[0] for option, value in places.items()}
    drawing = Drawing(
        trained,
        options.num,
        options.seed,
        options.steps,
        options.guidance_scale,
        options.class_name,
        given,
        options.number,
        options.batch_size,
    )
    cases, num, total = drawing.cases, drawing.num, drawing.total
    names = [case.name for case in cases] or ["sample"]
    paths = [out / f"{name}_{_title(options)}_{number:04d}.nii.gz" for name in names for number in range(num)]
    notes = [f"condition {cases[number // num].digest[:32]}" if cases else "" for number in range(total)]
    for path, note in zip(paths, notes, strict=True):
        if path.exists() and note_of(path) != note:
            raise UserError(
                f"--out: {printable(path)} is the sample of another condition of that name; only the samples of the "
                "same files are replaced; choose another folder, or remove it"
            )

    rows: list[Row] = []
    with ProgressBar(total=drawing.num_steps, desc="sampling", unit="step") as bar:
        samples = drawing.draw(bar.update, lambda number: printable(paths[number]))
        for path, note, sample in zip(paths, notes, samples, strict=True):
            write_nifti(path, sample.volume.voxels, sample.volume.affine, note)
            if len(rows) < MOST_SHOWN:
                rows.append(Row.of(path.name, *sample.shown))
    picture = out / f"montage_{_title(options, title_of(given))}.png"
    shown = counted(total, "sample") if total <= MOST_SHOWN else f"the first {MOST_SHOWN} of {total:,} samples"
    save_picture(picture, picture_of(rows), f"{trained.settings.name}, {shown}")
    log.info("%s written to %s, montage %s", counted(total, "volume"), out, picture)
    log.info("next: python scripts/evaluate.py --run %s", shlex.quote(options.run))
    return 0


def _title(options: argparse.Namespace, conditions: str | None = None) -> str:
    """Return the name of the conditions and all options of the samples, so that different ones never share a name."""
    parts = [conditions, f"seed{options.seed}", "best" if options.best else None, options.class_name, *options.number]
    parts.append(None if options.steps is None else f"steps{options.steps}")
    parts.append(None if options.guidance_scale is None else f"guidance{options.guidance_scale:g}")
    return "_".join(part.replace("/", "%2F") for part in parts if part is not None)


if __name__ == "__main__":
    sys.exit(run(main, parse()))
