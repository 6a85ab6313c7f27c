"""Make README's picture from a finished run: a held-out volume, its reconstruction, and samples."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import check_output_file, parser, run
from settings import UserError

ROOT = Path(__file__).resolve().parent.parent
PLANES = {"axial": 2, "coronal": 1, "sagittal": 0}
NUM_SAMPLES = 4


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["bash scripts/quickstart.sh && python dev/readme_picture.py"])
    result.add_argument("--run", default="runs/quickstart", metavar="DIR", help="default: runs/quickstart")
    result.add_argument(
        "--out", default=str(ROOT / "docs" / "images" / "quickstart.png"), metavar="FILE", help="the picture"
    )
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Draw the newest volumes that the run has kept for its report."""
    check_output_file(options.out, "--out")
    volumes = _newest(Path(options.run))
    columns = {"held-out input": volumes["input_0"], "reconstruction": volumes["reconstruction_0"]}
    samples = sorted(role for role in volumes if role.startswith("sample_"))[:NUM_SAMPLES]
    columns |= {f"sample {number + 1}": volumes[role] for number, role in enumerate(samples)}
    _draw(columns, Path(options.out))
    print(options.out)
    return 0


def _newest(folder: Path) -> dict[str, Any]:
    """Return the newest volume of each role as (D, H, W) bytes."""
    import numpy as np
    from PIL import Image

    from report.volumes import stored_volumes
    from storage.run_folder import RunFolder

    found: dict[str, Any] = {}
    for stored in stored_volumes(RunFolder(folder)):
        facts = stored.to_page()
        if stored.role not in found and facts is not None:
            depth, height, width = facts["shape"]
            with Image.open(stored.path) as picture:
                tiles = np.asarray(picture)
            parts = tiles.reshape(-1, height, facts["columns"], width).transpose(0, 2, 1, 3)
            found[stored.role] = parts.reshape(-1, height, width)[:depth]
    missing = {"input_0", "reconstruction_0", "sample_0"} - found.keys()
    if missing:
        raise UserError(f"{folder}: no {', '.join(sorted(missing))} in previews/volumes; finish both stages first")
    return found


def _draw(columns: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    planes = [
        [np.rot90(volume.take(volume.shape[axis] // 2, axis=axis)) for volume in columns.values()]
        for axis in PLANES.values()
    ]
    heights = [row[0].shape[0] / row[0].shape[1] for row in planes]
    size = (1.9 * len(columns) + 0.3, 1.9 * sum(heights) + 0.5)
    figure, axes = pyplot.subplots(
        *(len(PLANES), len(columns)), figsize=size, height_ratios=heights, facecolor="black", layout="constrained"
    )
    for row, (name, pictures) in enumerate(zip(PLANES, planes, strict=True)):
        for place, picture in zip(axes[row], pictures, strict=True):
            place.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="bicubic")
            place.set(xticks=[], yticks=[])
        axes[row][0].set_ylabel(name, color="white", fontsize=12)
    for place, name in zip(axes[0], columns, strict=True):
        place.set_title(name, color="white", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="black")


if __name__ == "__main__":
    sys.exit(run(main, parse()))
