"""Encode and decode volumes with a run's autoencoder, and write the reconstructions on each volume's own grid."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import ProgressBar, add_run_options, check_output_folder, parser, run
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
    add_run_options(result, "--run", "--best", "--budget-gb")
    result.add_argument("--input", required=True, metavar="PATH", help="a volume, or a folder of volumes")
    result.add_argument("--out", required=True, metavar="DIR", help="folder for the reconstructions")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Reconstruct one volume, or every volume of a folder, and print PSNR and SSIM of each."""
    from data.formats import suffix_of
    from evaluation.api import open_run
    from runtime.files import printable
    from training.validation.metrics import psnr, ssim

    check_output_folder(options.out)
    opened = open_run(options.run, best="autoencoder" if options.best else None, budget_gb=options.budget_gb)
    trained = opened.trained
    source = Path(options.input)
    if not source.exists():
        raise DataError(f"--input: {printable(source)} does not exist; give a volume or a folder of volumes")
    names = {source: source.name} if source.is_file() else _volumes_in(source, trained.settings)
    # Without its suffix, unless two names would be the same.
    stems = {path: name[: len(name) - len(suffix_of(name) or "")] for path, name in names.items()}
    taken = Counter([*stems.values(), *names.values()])
    targets = {
        path: Path(options.out) / f"{stem if taken[stem] == 1 else names[path]}_reconstruction.nii.gz"
        for path, stem in stems.items()
    }
    inputs = {path.resolve() for path in names}
    if read := [target for target in targets.values() if target.resolve() in inputs]:
        raise DataError(f"--out: {printable(read[0])} is one of the input volumes; give another folder")

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


if __name__ == "__main__":
    sys.exit(run(main, parse()))
