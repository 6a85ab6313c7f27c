"""Train stage 2 of every preset with its shipped settings and with quickstart's, for the same steps on small phantoms.

The U-Nets are the presets' own; only the phantoms are small. Presets whose settings of stage 2 are equal share a row;
`maisi`, which fine-tunes published weights, has none.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.recipe import CPU, SampleJudge, reconstructions, train, train_on_latents, volume_batches
from command_line import parser
from data import prepare_volumes
from evaluation.ldm_validation import validate_ldm
from evaluation.samples import draw_samples
from models import StockAutoencoder
from settings import Settings, load_settings
from training.autoencoder_step import AutoencoderStep

ROOT = Path(__file__).resolve().parents[2]
NUM_SAMPLES = 32
FINE_TUNING = "maisi"
RECIPE = ("scheduler", "latents", "sampling", "training")
SMALL = {
    "device.type": "cpu",
    "data.num_phantoms": 160,
    "data.val_fraction": 0.2,
    "data.voxel_size": (16, 16, 16),
    "data.patch_size": None,
    "data.prepared": "memory",
    "autoencoder.training.max_steps": 300,
}
FIXED = {
    "ldm.latents.cache": "memory",
    "ldm.sampling.num_previews": 0,
    "ldm.sampling.num_inference_steps": 12,
    "ldm.training.warmup_steps": "auto",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python -m dev.recipes", "python -m dev.recipes --steps 20"])
    result.add_argument("--steps", type=int, default=100, help="updates of stage 2 (default: %(default)s)")
    result.add_argument("--out", type=Path, default=ROOT / "docs" / "preset_recipes.md", metavar="FILE")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Train one autoencoder, then stage 2 of each kind of preset twice; write the table after every row."""
    quickstart = load_settings(ROOT / "configs" / "quickstart.yaml").with_overrides(SMALL)
    kinds = _kinds(quickstart, options.steps)
    split = prepare_volumes(quickstart.data, quickstart.seed, quickstart.autoencoder.in_channels)
    step = AutoencoderStep(quickstart, CPU)
    train(step, volume_batches(quickstart, split))
    found = reconstructions(step.autoencoder, split, quickstart)
    judge = SampleJudge(split, quickstart, NUM_SAMPLES)
    lines = [_head(options.steps, found["psnr"], judge.anchors())]
    for presets, recipe, settings in kinds:
        loss, judged = _trained(step.autoencoder, settings, judge)
        cells = (", ".join(presets), recipe, f"{settings.ldm.training.learning_rate:g}", f"{loss:.4f}")
        lines.append(f"| {' | '.join(cells)} | {judged['mmd_squared']:.4f} | {judged['sharpness']:.2f} |")
        print(lines[-1])
        options.out.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 0


def _kinds(small: Settings, num_steps: int) -> list[tuple[list[str], str, Settings]]:
    """Return each kind of stage 2 with the names of its presets: as shipped, and its U-Net with quickstart's recipe."""
    paths = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if path.stem != FINE_TUNING]
    presets = {path.stem: load_settings(path).model_dump()["ldm"] for path in paths}
    names: dict[str, list[str]] = {}
    for preset, values in presets.items():
        names.setdefault(json.dumps(values, sort_keys=True), []).append(preset)
    kinds = []
    for alike in names.values():
        shipped = presets[alike[0]]
        kinds.append((alike, "as shipped", shipped))
        if "quickstart" not in alike:
            recipe = {name: presets["quickstart"][name] for name in RECIPE}
            kinds.append((alike, "quickstart's recipe", {**shipped, **recipe}))
    fixed = {**FIXED, "ldm.training.max_steps": num_steps}
    return [
        (alike, recipe, small.with_overrides({**{f"ldm.{name}": value for name, value in ldm.items()}, **fixed}, "ldm"))
        for alike, recipe, ldm in kinds
    ]


def _trained(network: StockAutoencoder, settings: Settings, judge: SampleJudge) -> tuple[float, dict[str, float]]:
    """Train stage 2 on the latents of `network`; return its held-out loss and how good its samples are."""
    step, latents, _ = train_on_latents(network, settings, judge.split)
    loss = validate_ldm(step, latents)[0]["val_diffusion"]
    samples = draw_samples(step.unet, step.codec, settings, step.normalisation, settings.seed, NUM_SAMPLES, 4)
    return loss, judge.judge(samples)


def _head(num_steps: int, psnr: float, anchors: dict[str, float]) -> str:
    described = ", ".join(f"{value:.3f} for {name}" for name, value in anchors.items())
    return f"""# The presets' stage 2 at equal steps

Written by `python -m dev.recipes`; do not edit by hand.

{num_steps} updates on the latents of 160 phantoms of 16x16x16, a fifth of them held out, from one autoencoder
({psnr:.1f} dB), one seed. Held-out loss is the mean squared error of the prediction over four noise levels.
Mmd squared compares {NUM_SAMPLES} samples with held-out volumes on principal components: {described}.
Sharpness is the gradient magnitude relative to held-out volumes.

| presets | recipe | learning rate | held-out loss | mmd squared | sharpness |
|---|---|---:|---:|---:|---:|"""
