"""Encode and decode volumes with a run's autoencoder, and write the reconstructions on each volume's own grid."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import at_least, check_output_folder, parser, run
from settings import DataError, Settings

if TYPE_CHECKING:
    from models.volume_codec import VolumeCodec

log = logging.getLogger("reconstruct")

RECONSTRUCTION = "_reconstruction.nii.gz"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/reconstruct.py --run runs/quickstart --input volume.nii.gz --out reconstructions",
            "python scripts/reconstruct.py --run runs/vq --input /data/ct --out kept --codes",
        ],
    )
    result.add_argument(
        "--best", action="store_true", help="use the weights of the best validation (default: the last weights)"
    )
    result.add_argument("--run", required=True, metavar="DIR", help="folder of a run, finished or not")
    result.add_argument("--input", required=True, metavar="PATH", help="a volume, or a folder of volumes")
    result.add_argument("--out", required=True, metavar="DIR", help="folder for the reconstructions")
    codes = result.add_mutually_exclusive_group()
    codes.add_argument("--codes", action="store_true", help="vq: also write each latent as integers, NAME_codes.npz")
    codes.add_argument(
        "--from-codes", action="store_true", help="the input is such a file or a folder of them; decode it"
    )
    result.add_argument(
        "--budget-gb",
        type=at_least(0.0),
        help="use slabs if more memory than this is needed (default: the free memory)",
    )
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Reconstruct one volume, or every volume of a folder, and print PSNR and SSIM of each."""
    from tqdm import tqdm

    from data import load_volume, restore
    from data.formats import write_nifti
    from diffusion.codes import SUFFIX, Codes, quantiser_of
    from evaluation.trained_run import TrainedRun, check_finite
    from runtime.files.names import printable
    from training.validation.pair_metrics import psnr, ssim

    check_output_folder(options.out)
    trained = TrainedRun(options.run, options.budget_gb, best="autoencoder" if options.best else None)
    source = Path(options.input)
    if not source.exists():
        raise DataError(f"--input: {printable(source)} does not exist; give a volume or a folder of volumes")
    if options.from_codes:
        return _decode(source, Path(options.out), trained.codec())
    names = {source: source.name} if source.is_file() else _volumes_in(source, trained.settings)
    targets = dict(zip(names, _targets(list(names.values()), Path(options.out)), strict=True))
    inputs = {path.resolve() for path in names}
    for target in targets.values():
        if target.resolve() in inputs:
            raise DataError(f"--out: {printable(target)} is one of the input volumes; give another folder")
    codec = trained.codec()
    device = trained.precision.device
    if options.codes:
        quantiser_of(codec)

    for path, target in tqdm(targets.items(), desc="reconstructing", unit="volume"):
        loaded = load_volume(path, trained.settings.data, trained.settings.autoencoder.in_channels)
        mean = codec.encode(loaded.image)
        volume = check_finite(codec.decode(mean), printable(path))
        voxels, affine = restore(volume, loaded)
        write_nifti(target, voxels, affine)
        if options.codes:
            codes, kept = Codes.of(mean, loaded, codec), target.with_name(target.name.replace(RECONSTRUCTION, SUFFIX))
            codes.write(kept, codec)
            log.info("%s: %s", printable(kept), codes.describe(mean))
        pair = volume[None], loaded.image[None].to(device)
        log.info("%s: PSNR %.2f dB, SSIM %.4f", printable(target), float(psnr(*pair)), float(ssim(*pair)))
    if trained.folder.weights("autoencoder").exists() and not trained.folder.weights("ldm").exists():
        log.info("next: python train_ldm.py --config %s", shlex.quote(str(trained.folder.config)))
    return 0


def _volumes_in(folder: Path, settings: Settings) -> dict[Path, str]:
    """Return the volumes of a folder by path, without label maps unless the run was trained on them."""
    from data.notes import grouped, problem_lines
    from data.volumes import check_source
    from runtime.files.names import counted, printable

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
    return [out / f"{name}{RECONSTRUCTION}" for name in chosen]


def _decode(source: Path, out: Path, codec: VolumeCodec) -> int:
    """Decode a file of codes, or all of a folder, to volumes on the grid of the network."""
    from data.formats import write_nifti
    from diffusion.codes import SUFFIX, Codes
    from evaluation.trained_run import check_finite
    from runtime.files.names import printable

    paths = [source] if source.is_file() else sorted(source.rglob(f"*{SUFFIX}"))
    if not paths:
        raise DataError(f"--input: {printable(source)} holds no *{SUFFIX}; give a folder that --codes wrote to")
    for path in paths:
        codes = Codes.read(path, codec)
        inside = path.relative_to(source if source.is_dir() else source.parent)
        target = out / inside.with_name(path.name.removesuffix(".npz").removesuffix("_codes") + RECONSTRUCTION)
        write_nifti(target, codes.intensities(check_finite(codes.decode(codec), printable(path))), codes.affine)
        log.info("%s: decoded from %s", printable(target), printable(path))
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
