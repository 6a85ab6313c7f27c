"""Measure reading, preparation and loading of volumes side by side with MONAI.

The volume is a CT of hospital size (512x512x300, int16, gzipped), the grid 256x256x64. Parts: `reading` compares the
first reading with MONAI's transforms, `samples` prepared samples with MONAI's PersistentDataset, and `waiting` shows
how much of its time a preset waits for data if an update takes 0.3 s.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scipy.ndimage import zoom

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import BatchPlan, load_volume, prepare_volumes, training_batches
from data.formats import write_nifti
from settings import DataSettings, load_settings

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("reading", "samples", "waiting")
SHAPE = (512, 512, 300)
GRID = (256, 256, 64)
STEP_SECONDS = 0.3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    result.add_argument("--volumes", type=int, default=4, help="number of volumes, for samples and waiting")
    result.add_argument("--rounds", type=int, default=3, help="rounds of reading, in which both sides take turns")
    result.add_argument("--updates", type=int, default=20, help="updates per preset, for waiting")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Make the volume in a temporary folder and print the parts that were asked for."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        scan = Path("scan.nii.gz")
        write_ct(scan)
        print(f"a CT of {'x'.join(map(str, SHAPE))}, int16, {scan.stat().st_size / 2**20:.0f} MiB gzipped")
        if "reading" in options.parts:
            compare_reading(scan, options.rounds)
        volumes = copies(scan, options.volumes)
        if "samples" in options.parts:
            compare_samples(volumes)
        if "waiting" in options.parts:
            measure_waiting(volumes, options.updates)
    return 0


def write_ct(path: Path) -> None:
    """Write smooth structure with noise, which compresses about as well as a real scan."""
    rng = np.random.default_rng(0)
    coarse = rng.normal(0, 400, (17, 17, 11)).astype(np.float32)
    smooth = zoom(coarse, [n / c for n, c in zip(SHAPE, coarse.shape, strict=True)], order=1)
    smooth += rng.standard_normal(SHAPE, dtype=np.float32) * 20
    affine = np.diag([-0.7, -0.7, 1.0, 1.0])
    write_nifti(path, np.clip(smooth, -1024, 3071).astype(np.int16)[None], affine)


def copies(scan: Path, number: int) -> Path:
    """Write copies that differ in the time in their gzip header only, so that each is a volume of its own."""
    folder = Path("volumes")
    folder.mkdir()
    content = bytearray(scan.read_bytes())
    for index in range(number):
        content[4:8] = index.to_bytes(4, "little")
        (folder / f"scan_{index:03d}.nii.gz").write_bytes(content)
    return folder


def monai_reading(grid: tuple[int, ...] | None) -> Any:
    """Return MONAI's transforms for the same job."""
    import monai.transforms as mt

    steps = [
        mt.LoadImage(image_only=True, ensure_channel_first=True),
        mt.Orientation("RAS"),
        mt.ScaleIntensityRangePercentiles(0.5, 99.5, -1.0, 1.0, clip=True),
    ]
    return mt.Compose(steps if grid is None else [*steps, mt.Resize(grid, mode="trilinear")])


def compare_reading(scan: Path, rounds: int) -> None:
    """Print time and memory of the first reading, ours and MONAI's in turn."""
    ours = DataSettings(voxel_size=GRID)
    theirs = monai_reading(GRID)
    rows: dict[str, list[tuple[float, float]]] = {"ours": [], "MONAI": []}
    for _ in range(rounds):
        rows["ours"].append(timed(lambda: load_volume(scan, ours)))
        rows["MONAI"].append(timed(lambda: theirs(scan)))
    for name, times in rows.items():
        cpu, wall = (min(column) for column in zip(*times, strict=True))
        print(f"reading, {name}: {cpu:.2f} s of CPU time, {wall:.2f} s by the clock (best of {rounds})")
    cpu, wall = (min(a[k] for a in rows["ours"]) / min(b[k] for b in rows["MONAI"]) for k in range(2))
    print(f"reading, ratio: {cpu:.2f} of MONAI's CPU time, {wall:.2f} by the clock")
    size = 4 * np.prod(SHAPE)
    peak = peak_memory(lambda: load_volume(scan, ours))
    print(f"reading, peak memory: {peak / size:.2f} times the volume as float32")
    # Without resampling both sides do the same; the kernels of resampling differ by design.
    same = load_volume(scan, DataSettings(voxel_size=SHAPE)).image.numpy()
    difference = float(np.abs(same - np.asarray(monai_reading(None)(scan))).max())
    print(f"reading, largest difference on the file's own grid: {difference:.1e}")


def compare_samples(folder: Path) -> None:
    """Print the time of a first pass, of a prepared pass, and of MONAI's PersistentDataset."""
    from monai.data import PersistentDataset

    settings = DataSettings(source=str(folder), voxel_size=GRID, num_workers=0, val_fraction=0.01)
    number = len(list(folder.iterdir()))
    cpu, first = timed(lambda: prepare_volumes(settings, 0, 1))
    print(f"first pass over {number} volumes: {first:.2f} s by the clock, {cpu:.2f} s of CPU time")
    files = prepare_volumes(settings, 0, 1).train
    # Batches of one, as training sees them; two passes, of which the second counts.
    for _ in range(2):
        steps = training_batches(files, settings, BatchPlan(0, 1, 1), 0, len(files))
        cpu, wall = timed(partial(list, steps))
    print(f"prepared sample: {per_sample(wall, files)} by the clock, {per_sample(cpu, files)} of CPU time")
    print(f"prepared pass: 1/{first / number / (wall / len(files)):.0f} of the first")
    theirs = PersistentDataset([str(file.path) for file in files], monai_reading(GRID), cache_dir="persistent")
    for _ in range(2):
        cpu, wall = timed(lambda: [np.array(theirs[index]) for index in range(len(theirs))])
    print(f"PersistentDataset: {per_sample(wall, files)} by the clock, {per_sample(cpu, files)} of CPU time")


def measure_waiting(folder: Path, updates: int) -> None:
    """Print the share of time that each preset waits for data."""
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        values = [f"data.source={folder}", "data.val_fraction=0.01"]
        settings = load_settings(path, values)
        files = prepare_volumes(settings.data, settings.seed, 1).train
        plan = BatchPlan.of(settings.autoencoder.training, settings.seed, 0, 1)
        steps = training_batches(files, settings.data, plan, 0, updates + 1)
        # The workers start with the run; while its first step is computed they load the second.
        next(steps)
        began, waited = time.perf_counter(), 0.0
        for _ in range(updates):
            time.sleep(STEP_SECONDS)
            asked = time.perf_counter()
            next(steps)
            waited += time.perf_counter() - asked
        share = waited / (time.perf_counter() - began)
        print(f"waiting, {path.stem}: {100 * share:.1f} % of the time, {plan.effective_batch} volumes an update")


def per_sample(seconds: float, files: Sequence[Any]) -> str:
    """Return the time of one sample as text."""
    return f"{1000 * seconds / len(files):.1f} ms"


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the CPU time of this process and the time by the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def peak_memory(work: Callable[[], Any]) -> int:
    """Return how many bytes the process grew by at most, seen every few milliseconds."""
    process, highest, is_done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def look() -> None:
        while not is_done.wait(0.002):
            highest[0] = max(highest[0], process.memory_info().rss)

    watcher = threading.Thread(target=look)
    watcher.start()
    work()
    is_done.set()
    watcher.join()
    return highest[0] - before


if __name__ == "__main__":
    sys.exit(main(parse()))
