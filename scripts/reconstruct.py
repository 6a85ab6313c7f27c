"""Encode and decode volumes with a run's autoencoder, and write the reconstructions on each volume's own grid."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import at_least, check_output_folder, parser, run
from settings import DataError, Settings

log = logging.getLogger("reconstruct")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/reconstruct.py --run runs/quickstart --input volume.nii.gz --out reconstructions",
            "python scripts/reconstruct.py --run runs/quickstart --input /data/ct --out reconstructions --best",
        ],
    )
    result.add_argument(
        "--best", action="store_true", help="use the weights of the best validation (default: the last weights)"
    )
    result.add_argument("--run", required=True, metavar="DIR", help="folder of a run, finished or not")
    result.add_argument("--input", required=True, metavar="PATH", help="a volume, or a folder of volumes")
    result.add_argument("--out", required=True, metavar="DIR", help="folder for the reconstructions")
    result.add_argument(
        "--budget-gb",
        type=at_least(0.0),
        help="use slabs if more memory than this is needed (default: the free memory)",
    )
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Reconstruct one volume, or every volume of a folder, and print PSNR and SSIM of each."""
    from evaluation.api import open_run
    from runtime.cli.bars import ProgressBar
    from runtime.files import printable
    from training.validation.metrics import psnr, ssim

    check_output_folder(options.out)
    opened = open_run(options.run, best="autoencoder" if options.best else None, budget_gb=options.budget_gb)
    trained = opened.trained
    source = Path(options.input)
    if not source.exists():
        raise DataError(f"--input: {printable(source)} does not exist; give a volume or a folder of volumes")
    names = {source: source.name} if source.is_file() else _volumes_in(source, trained.settings)
    targets = dict(zip(names, _targets(list(names.values()), Path(options.out)), strict=True))
    inputs = {path.resolve() for path in names}
    for target in targets.values():
        if target.resolve() in inputs:
            raise DataError(f"--out: {printable(target)} is one of the input volumes; give another folder")

    for path, target in ProgressBar(targets.items(), desc="reconstructing", unit="volume"):
        result, image, output = opened.reconstructed(path)
        result.save(target)
        pair = output[None], image[None].to(output.device)
        log.info("%s: PSNR %.2f dB, SSIM %.4f", printable(target), float(psnr(*pair)), float(ssim(*pair)))
    if trained.folder.weights("autoencoder").exists() and not trained.folder.weights("ldm").exists():
        log.info("next: python train_ldm.py --config %s", shlex.quote(str(trained.folder.config)))
    return 0


def _volumes_in(folder: Path, settings: Settings) -> dict[Path, str]:
    """Return the volumes of a folder by path, without label maps unless the run was trained on them."""
    from data.header import grouped, problem_lines
    from data.volumes import check_source
    from runtime.files import counted, printable

    asked = {"source": str(folder), "class_labels": None, "prepared": "none"}
    data = settings.data.model_copy(update=asked)
    source = check_source(data, settings.seed, settings.autoencoder.in_channels)
    if source.problems:
        number = counted(len(source.problems), "problem")
        raise DataError(f"--input: {printable(folder)} has {number}:\n{problem_lines(source.problems)}")
    for line in grouped(source.left_out):
        log.warning("%s", line)
    return {item.path: item.name for item in source.volumes}


def _targets(names: Sequence[str], out: Path) -> list[Path]:
    """Return an output file for each volume, named without its suffix unless two names would be the same."""
    from data.formats import suffix_of

    stems = [name[: len(name) - len(suffix_of(name) or "")] for name in names]
    taken = Counter([*stems, *names])
    chosen = [stem if taken[stem] == 1 else name for stem, name in zip(stems, names, strict=True)]
    return [out / f"{name}_reconstruction.nii.gz" for name in chosen]


if __name__ == "__main__":
    sys.exit(run(main, parse()))
