"""Resample label maps, masks or images to the grids of the volumes they belong to, and write them under their names."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import ProgressBar, check_output_folder, parser, run
from settings import DataError

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("resample")

TOO_LARGE_LABEL = 1 << 24
"""From here on neighbouring whole numbers are the same in float32."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/resample.py --volumes /data/ct --partners /data/labels --kind labels --out labels_on_grid",
            "python scripts/resample.py --volumes case.nii.gz --partners mask.nii.gz --kind labels --out resampled",
        ],
    )
    result.add_argument("--volumes", required=True, metavar="PATH", help="a volume, or a folder of volumes")
    text = "the file that belongs to the volume; for a folder, a folder or a CSV file with columns file and partner"
    result.add_argument("--partners", required=True, metavar="PATH", help=text)
    text = "labels: the nearest voxel, 0 outside; image: linear interpolation, the lowest value outside"
    result.add_argument("--kind", required=True, choices=("labels", "image"), help=text)
    result.add_argument("--out", required=True, metavar="DIR", help="folder for the resampled files")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Write the partner of each volume on the volume's grid, and print how much of the volume it covers."""
    check_output_folder(options.out)
    from data.discovery import is_plain_folder
    from data.formats import stem, write_nifti
    from runtime.files import printable

    pairs = pairs_of(options.volumes, options.partners)
    targets = {name: Path(options.out) / f"{stem(name)}.nii.gz" for name in pairs}
    inputs = {path.resolve() for pair in pairs.values() for path in pair}
    if len({*targets.values()}) < len(targets):
        raise DataError("--volumes: two volumes differ in the ending of their type alone; rename one of them")
    if read := [target for target in targets.values() if target.resolve() in inputs]:
        raise DataError(f"--out: {printable(read[0])} is one of the input files; give another folder")
    is_inside = Path(options.out).resolve().is_relative_to(Path(options.volumes).resolve())
    if is_inside and is_plain_folder(options.volumes):
        raise DataError(
            f"--out: {printable(options.out)} lies in --volumes, whose files are all volumes; give another folder"
        )
    for name, (volume, partner) in ProgressBar(pairs.items(), desc="resampling", unit="volume"):
        voxels, affine, covered = resampled(partner, volume, is_labels=options.kind == "labels")
        write_nifti(targets[name], voxels, affine)
        log.info("%s: %s covers %.0f %% of the volume", printable(targets[name]), printable(partner), 100 * covered)
    return 0


def pairs_of(volumes: str, partners: str) -> dict[str, tuple[Path, Path]]:
    """Return each volume and its partner by the volume's name; raise `DataError` for volumes without one."""
    from data.discovery import VolumeFile, find
    from data.partners import PartnerSource, find_partners
    from runtime.files import printable

    if os.path.isfile(volumes) and not volumes.lower().endswith(".json"):
        if not os.path.isfile(partners) or partners.lower().endswith(".csv"):
            raise DataError(f"--partners: {printable(partners)} is not one volume, as --volumes is; give two of a kind")
        return {Path(volumes).name: (Path(volumes), Path(partners))}
    files = [VolumeFile(found.path, found.name) for found in find(volumes)[0]]
    problems: list[str] = []
    found = find_partners(PartnerSource(partners, "--partners", "partner"), files, problems)
    if problems:
        raise DataError("\n  ".join(["--partners: these volumes have none or several:", *problems]))
    return {file.name: (file.path, found[file.name]) for file in files}


def resampled(partner: Path, volume: Path, is_labels: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Return a partner at the voxels of its volume, their affine, and the share of them that lie inside the partner."""
    import numpy as np
    from scipy import ndimage

    from data.formats import read_header, read_stored
    from data.header import FileError

    stored, header = read_stored(partner)
    grid = read_header(volume)
    for path, one in ((partner, header), (volume, grid)):
        if not one.has_spacing:
            raise FileError(path, "stores no spacing and orientation, which resampling needs; convert it to NIfTI")
    values = stored.values(stored.array)
    if not np.isfinite(values).all():
        raise FileError(partner, "has values that are not finite; replace them")
    if is_labels and (values != values.round()).any():
        raise FileError(partner, "has values that are not whole numbers; give --kind image")
    if is_labels and np.abs(values).max() >= TOO_LARGE_LABEL:
        raise FileError(partner, f"has labels that are not below {TOO_LARGE_LABEL:,}; give them smaller numbers")
    to_partner = np.linalg.inv(header.affine) @ grid.affine
    inside = np.ones(header.shape, np.uint8)
    inside = ndimage.affine_transform(inside, to_partner, output_shape=grid.shape, order=0, mode="grid-constant") > 0
    if not inside.any():
        raise FileError(partner, f"does not overlap with its volume {volume}; check the orientation in both files")
    # Without this, every other voxel of a partner with voxels half as large would be ignored.
    ratios = np.abs(to_partner[:3, :3]).max(axis=1)
    blur = np.zeros(3) if is_labels else np.maximum(ratios - 1, 0) / 2
    result = np.empty((header.num_channels, *grid.shape), np.float32)
    for channel, target in zip(values, result, strict=True):
        target[:] = 0 if is_labels else channel.min()
        smooth = ndimage.gaussian_filter(channel, blur, mode="nearest") if blur.any() else channel
        moved = ndimage.affine_transform(
            smooth, to_partner, output_shape=grid.shape, order=0 if is_labels else 1, mode="nearest"
        )
        target[inside] = moved[inside]
    return result.astype(np.int32) if is_labels else result, grid.affine, float(inside.mean())


if __name__ == "__main__":
    sys.exit(run(main, parse()))
