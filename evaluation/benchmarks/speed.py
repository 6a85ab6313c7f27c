"""Interleaved timings of whole steps, of encoding volumes and of starting up.

In CPU seconds, which depend little on what else the machine is doing.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data import Batch
from data.volumes import VolumeFile
from diffusion.latent_files import LatentFacts, LatentFolder
from evaluation.benchmarks.peaks import predict_variants
from evaluation.benchmarks.variants import STOCK, base_settings, use_default_attention, use_matrix_attention, variants
from models import StockAutoencoder, build_autoencoder
from models.volume_codec import VolumeCodec
from runtime.precision import Precision
from runtime.processes import Process
from settings import Settings
from training.autoencoder_step import AutoencoderStep

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def step_times(
    grid: tuple[int, ...], rounds: int, progress: Callable[[str], None], channels: tuple[int, ...] = (16, 32, 64)
) -> list[dict[str, Any]]:
    """Return CPU seconds of a whole fp32 step by variant, its ratio to stock within a round, and its predicted peak."""
    on_gpu = base_settings(grid, mixed_precision=False, channels=channels)
    settings = on_gpu.with_overrides({"device.type": "cpu"})
    steps: dict[str, AutoencoderStep] = {}
    ours = {}
    for variant in variants():
        step = AutoencoderStep(settings.with_overrides(variant.changes), Process(CPU))
        steps[variant.name] = use_matrix_attention(step) if variant.has_matrix else step
        ours[variant.name] = variant.is_ours
    image = torch.rand(1, 1, *grid, generator=torch.Generator().manual_seed(0)) * 2 - 1
    batch = Batch(image, (0,), None, ("",))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step([batch], number)
            # The first round makes optimizer states and fills caches.
            if number:
                seconds[name].append(time.process_time() - start)
            progress(f"{name}, round {number}")
    peaks = predict_variants(on_gpu, progress)
    return [
        {
            "variant": name,
            "is_ours": ours[name],
            "grid": list(grid),
            "peak_allocated_bytes": peaks[name],
            "seconds": round(statistics.median(values), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(values, seconds[STOCK], strict=True)), 3),
        }
        for name, values in seconds.items()
    ]


@torch.no_grad()
def encoding_rates(grid: tuple[int, ...], rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return how many volumes each variant encodes per CPU second, and how fast kept latents are read."""
    settings = base_settings(grid, mixed_precision=False).with_overrides({"device.type": "cpu"})
    volume = torch.rand(1, *grid, generator=torch.Generator().manual_seed(0)) * 2 - 1
    stock = settings.with_overrides({"autoencoder.implementation": "monai"})
    networks = {"stock MONAI, default attention": _network(stock), STOCK: _network(stock), "ours": _network(settings)}
    use_default_attention(networks["stock MONAI, default attention"])
    precision = Precision(settings.device, CPU)
    encoders = {name: VolumeCodec(net, settings.autoencoder, precision) for name, net in networks.items()}
    for name in list(encoders)[:2]:
        encoders[name].has_slabs = False
    seconds: dict[str, list[float]] = {name: [] for name in [*encoders, "ours, from the cache"]}
    with tempfile.TemporaryDirectory() as folder:
        file = VolumeFile(Path(__file__).resolve(), "volume")
        latents = LatentFolder(Path(folder), settings.latent_shape)
        facts = LatentFacts((1.0,) * 3, (0.0,), (1.0,))
        for number in range(rounds + 1):
            for name, encoder in encoders.items():
                start = time.process_time()
                mean = encoder.encode(volume)
                seconds[name].append(time.process_time() - start)
                progress(f"{name}, round {number}")
            latents.write(file, mean, facts)
            start = time.process_time()
            latents.read(file)
            seconds["ours, from the cache"].append(time.process_time() - start)
    return [
        {"variant": name, "grid": list(grid), "volumes_per_second": round(1 / statistics.median(values[1:]), 3)}
        for name, values in seconds.items()
    ]


def _network(settings: Settings) -> StockAutoencoder:
    torch.manual_seed(settings.seed)
    return build_autoencoder(settings.autoencoder).eval()


_PEER_IMPORTS = "import torch, monai.networks.nets, monai.transforms, monai.data, monai.losses, monai.config"
_BROKEN = "autoencoder.training.batch_sise=2"


def start_up(rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the CPU seconds that each command needs until its first output; the commands take turns."""
    config = ["--config", "configs/quickstart.yaml"]
    commands = {
        "imports of a script in MONAI's manner": [sys.executable, "-c", _PEER_IMPORTS],
        "ours: --help": [sys.executable, "train_autoencoder.py", "--help"],
        "ours: a misspelt key is reported": [sys.executable, "train_autoencoder.py", *config, _BROKEN],
        "ours: imports of stage 1": [
            sys.executable,
            "-c",
            "import data, memory.watch.memory_watch, training.autoencoder_step",
        ],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, command in commands.items():
            start = _children_seconds()
            subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
            seconds[name].append(_children_seconds() - start)
            progress(f"{name}, round {number}")
    return [{"what": name, "seconds": round(min(values), 3)} for name, values in seconds.items()]


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
