"""Sample volumes from exported weights with torch and MONAI alone; needs nothing of the project that trained them.

python scripts/export_checkpoint.py --weights runs/NAME/autoencoder.safetensors --out exported/autoencoder.safetensors
python scripts/export_checkpoint.py --weights runs/NAME/ldm.safetensors --out exported/ldm.safetensors
python sample_with_monai.py exported --num 4 --out samples
"""

from __future__ import annotations

import argparse
import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import monai.networks.nets
import nibabel as nib
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the values of an exported file."""
    with safe_open(path, framework="pt") as file:
        return load_file(path), {name: json.loads(text) for name, text in (file.metadata() or {}).items()}


def network(path: Path, device: str) -> Any:
    """Build MONAI's network as the file says, with its weights."""
    state, values = read(path)
    built = getattr(monai.networks.nets, values["class"])(**values["arguments"])
    built.load_state_dict(state, strict=True)
    return built.to(device).eval()


def noise(seed: int, position: int, shape: list[int]) -> torch.Tensor:
    """Return the noise that the sample at a position starts from."""
    digest = hashlib.blake2b(f"{seed}/sample/{position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(generator=generator)


def kept_variance(s: dict[str, Any]) -> np.ndarray:
    """Return, for each timestep of a ddpm process, the share of the variance that is signal."""
    count = s["num_train_timesteps"]
    if s["schedule"] == "cosine":
        curve = np.cos((np.linspace(0, 1, count + 1) + 0.008) / 1.008 * np.pi / 2) ** 2
        return np.cumprod(1 - np.clip(1 - curve[1:] / curve[:-1], 0, 0.999))
    return np.cumprod(1 - np.linspace(0.0015**0.5, 0.0195**0.5, count) ** 2)


def schedule(s: dict[str, Any], sampler: str, num_steps: int) -> list[tuple[float, float, float]]:
    """Return time, signal and noise level of each step, from noise to clean: x = signal * clean + level * noise."""
    if sampler not in ("ddim", "dpmpp_2m", "rflow"):
        raise SystemExit(
            f"sampler {sampler}: this script has ddim, dpmpp_2m and rflow; train or export with one of them"
        )
    count = s["num_train_timesteps"]
    if s["type"] == "rflow":
        if sampler == "dpmpp_2m":  # equal steps of the angle atan(level / signal)
            angles = np.pi / 2 * np.arange(num_steps, 0, -1) / num_steps
            shares = np.sin(angles) / (np.sin(angles) + np.cos(angles))
        else:
            shares = 1 - np.arange(num_steps) / num_steps
            shares = s["time_shift"] * shares / (1 + (s["time_shift"] - 1) * shares)
        return [(count * share, 1 - share, share) for share in shares]
    kept = kept_variance(s)
    last = max(1, int((np.sqrt(kept) >= 0.01).sum())) - 1  # beyond, there is no signal to divide by
    if sampler == "dpmpp_2m":
        by_time = np.arctan2(np.sqrt(1 - kept), np.sqrt(kept))
        angles = by_time[last] * np.arange(num_steps, 0, -1) / num_steps
        times = np.interp(angles, by_time, np.arange(count)).round()
    else:
        times = np.linspace(last, 0, num_steps).round() if num_steps > 1 else np.array([last])
    return [(time, kept[int(time)] ** 0.5, (1 - kept[int(time)]) ** 0.5) for time in times]


@torch.no_grad()
def sample(
    unet: torch.nn.Module, tensors: dict[str, torch.Tensor], v: dict[str, Any], x: torch.Tensor, label: int
) -> torch.Tensor:
    """Follow the schedule from noise (1, C, D, H, W) to a clean latent; the sampler is DDIM or DPM-Solver++(2M)."""
    s, sampler = v["scheduler"], v["sampling"]["sampler"]
    grid = x.shape[2:]
    missing = [-axis % v["multiple"] for axis in grid]
    pad = (0, missing[2], 0, missing[1], 0, missing[0])
    mean_map = tensors.get("mean_map")
    inputs = {"class_labels": torch.tensor([label], device=x.device)} if v["conditioning"] == "class" else {}

    def denoise(x: torch.Tensor, time: float, signal: float, level: float) -> tuple[torch.Tensor, torch.Tensor]:
        channels = x if mean_map is None else torch.cat([x, mean_map.to(x)], dim=1)
        predicted = unet(torch.nn.functional.pad(channels, pad), torch.tensor([time], device=x.device), **inputs)
        predicted = predicted[:, :, : grid[0], : grid[1], : grid[2]]
        if s["type"] == "rflow":
            return x + level * predicted, x - signal * predicted
        if s["prediction"] == "epsilon":
            return (x - level * predicted) / signal, predicted
        return signal * x - level * predicted, level * x + signal * predicted

    steps = schedule(s, sampler, v["sampling"]["num_inference_steps"])
    before, stride_before = None, 0.0
    for (time, signal, level), (_, next_signal, next_level) in pairwise(steps):
        clean, guessed = denoise(x, time, signal, level)
        if sampler != "dpmpp_2m":
            x = next_signal * clean + next_level * guessed
            continue
        stride = np.inf if signal == 0 else np.log(next_signal / next_level) - np.log(signal / level)
        towards = clean
        if before is not None and stride_before > 0:
            towards = clean + stride / (2 * stride_before) * (clean - before)
        x = next_level / level * x + (next_signal - next_level * signal / level) * towards
        before, stride_before = clean, stride
    return denoise(x, *steps[-1])[0]


def main() -> None:
    """Sample, decode, and write NIfTI files in the intensities of the training volumes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the exported files")
    parser.add_argument("--num", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("samples"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tensors, v = read(options.folder / "ldm_sampling.safetensors")
    if v["conditioning"] not in ("none", "class") or (
        v["conditioning"] == "class" and v["sampling"]["guidance_scale"] != 1
    ):
        raise SystemExit("this script samples without conditions, or with classes and a guidance scale of 1")
    unet = network(options.folder / "ldm.safetensors", options.device)
    autoencoder = network(options.folder / "autoencoder.safetensors", options.device)
    scale, mean = (tensors[f"latent_{name}"].to(options.device) for name in ("scale", "mean"))
    spacing = np.array(v["spacing_mm"])
    low, high = v["value_range"]
    lower, upper = (np.array(v[name], np.float32).reshape(-1, 1, 1, 1) for name in ("lower", "upper"))
    options.out.mkdir(parents=True, exist_ok=True)
    for position in range(options.num):
        start = noise(options.seed, position, v["latent_shape"])[None].to(options.device)
        latent = sample(unet, tensors, v, start, position % max(1, v["num_classes"] or 1))
        with torch.no_grad():
            volume = autoencoder.decode(latent / scale + mean)[0].float().cpu()
        unit = ((volume - low) / (high - low)).clamp(0, 1).numpy()
        voxels = lower + unit * (upper - lower)
        affine = np.diag([*spacing, 1.0])
        affine[:3, 3] = -spacing * (np.array(voxels.shape[1:]) - 1) / 2
        array = voxels[0] if len(voxels) == 1 else np.moveaxis(voxels, 0, -1)
        nib.save(nib.Nifti1Image(array, affine), options.out / f"sample_{position:04d}.nii.gz")


if __name__ == "__main__":
    main()
