"""Evaluate a trained run: reconstructions of held-out volumes, and samples against held-out and training volumes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import add_run_options, at_least, check_output_file, parser, run, write_output
from settings import UserError

log = logging.getLogger("evaluate")

FID_PROTOCOLS = ("radimagenet-2.5d", "medicalnet-3d")
COLUMNS = (
    ("psnr", "PSNR dB", ".2f"),
    ("ssim", "SSIM", ".4f"),
    ("ms_ssim", "MS-SSIM", ".4f"),
    ("iou", "IoU", ".3f"),
    ("chamfer", "Chamfer", ".3f"),
)
"""Measures of reconstructions: key, title and format. The last two are of mostly empty volumes, in voxels."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/evaluate.py --run runs/quickstart --json evaluation.json",
            "python scripts/evaluate.py --run runs/ct --num 64 --guidance-scale 2",
            "python scripts/evaluate.py --run runs/ct --fid medicalnet-3d --fid-weights resnet_50_23dataset.pth",
        ],
    )
    add_run_options(result, "--run", "--steps", "--guidance-scale", "--seed")
    result.add_argument("--json", metavar="FILE", help="also write all numbers as JSON")
    result.add_argument("--num", type=at_least(2), default=16, help="number of samples (default: 16)")
    text = "samples to draw at once; does not change them (default: 4)"
    result.add_argument("--batch-size", type=at_least(1), default=4, help=text)
    result.add_argument("--fid", choices=FID_PROTOCOLS, help="FID and KID on the features of this network")
    result.add_argument("--fid-weights", metavar="FILE", help="the weights of that network")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Evaluate both stages, or only the first if stage 2 is not trained; print a table and write JSON."""
    from data import prepare_volumes
    from diffusion.latents import stage_two_data
    from diffusion.sampling import VolumeSampler
    from evaluation.fid import FeatureNetwork
    from evaluation.quality import evaluate_reconstructions, evaluate_stage_two
    from evaluation.report import write_report
    from evaluation.trained_run import TrainedRun
    from runtime.files import counted, write_text

    if options.json is not None:
        check_output_file(options.json)
    if options.fid_weights is not None and options.fid is None:
        raise UserError("--fid-weights: given without --fid, which names their network; add --fid or leave it out")
    trained = TrainedRun(options.run)
    has_stage_two = trained.has_weights("ldm")
    if has_stage_two:
        network, frame = trained.unet()
    codec = trained.codec()
    device = codec.precision.device
    fid = FeatureNetwork(options.fid, options.fid_weights, device) if options.fid is not None else None
    settings = trained.sampling_settings(options.steps, options.guidance_scale)
    volumes = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
    data = stage_two_data(settings.data)
    threshold = settings.autoencoder.training.occupancy_threshold
    results: dict[str, Any] = {
        "run": str(trained.folder.path),
        "reconstruction": evaluate_reconstructions(codec, volumes.val, data, threshold),
    }
    if has_stage_two:
        sampler = VolumeSampler(network, codec, settings, frame.normalisation, options.seed, options.batch_size)
        results |= evaluate_stage_two(sampler, frame, volumes, options.num, fid)
        if fid is not None:
            results["fid"] = {"protocol": fid.protocol, "weights_sha256": fid.digest}
    else:
        log.warning("%s: no such file, so only reconstructions are evaluated", trained.folder.weights("ldm"))
    table = _table(results)
    print(table)
    undefined: list[str] = []
    # JSON has no NaN and no infinity: they become null.
    valid = json.loads(json.dumps(results), parse_constant=undefined.append)
    if undefined:
        text = "%s not finite, null in the results; volumes that are identical or constant, or too few, leave them so"
        log.warning(text, counted(len(undefined), "figure"))
    if options.json is not None:
        write_output(options.json, json.dumps(valid, indent=2, allow_nan=False) + "\n")
    try:
        write_text(trained.folder.evaluation, json.dumps({**valid, "table": table}, indent=2, allow_nan=False) + "\n")
        log.info("next: open %s", write_report(trained.folder.path))
    except OSError as error:
        log.warning("%s: cannot be written (%s), so the report lacks this evaluation", error.filename, error.strerror)
    return 0


def _table(results: dict[str, Any]) -> str:
    """Return the results as text: one line per held-out volume, then the samples beside their anchors."""
    from evaluation.quality import effect_lines
    from training.validation.skill import skill_in_words

    reconstruction = results["reconstruction"]
    rows = {row["volume"]: row for row in reconstruction["volumes"]} | {"mean": reconstruction["mean"]}
    columns = [column for column in COLUMNS if column[0] in reconstruction["mean"]]
    for end, text in enumerate(("95 % low", "95 % high")):
        rows[text] = {name: values[end] for name, values in reconstruction["interval"].items()}
    width = max(map(len, ("reconstruction", *rows)))
    lines = [f"{'reconstruction':<{width}}  " + " ".join(f"{title:>8}" for _, title, _ in columns)]
    for text, row in rows.items():
        lines.append(f"{text:<{width}}  " + " ".join(f"{row[name]:8{form}}" for name, _, form in columns))
    sharpness = reconstruction["sharpness"]["gradient_magnitude"]
    lines.append(f"sharpness of reconstructions: gradients {sharpness:.2f} of real ones")
    if "conditions" in results:
        lines += ["", *effect_lines(results["conditions"])]
    if "samples" in results:
        samples, skill = results["samples"], results["skill"].get("val_skill")
        closest = min(samples["nearest_training"], key=lambda row: row["ratio"])
        lines += ["", f"{samples['num']} samples"]
        if skill is not None:
            has_holes = results.get("conditions", {}).get("region") == "hole"
            lines.append(f"  {skill_in_words(skill, has_holes)}")
        lines += [
            f"  sharpness                     gradients {samples['sharpness']['gradient_magnitude']:.2f} of real ones",
            f"  MS-SSIM between samples       {samples['pairwise_ms_ssim']:.4f}"
            f" (between held-out volumes {samples['held_out_pairwise_ms_ssim']:.4f})",
            f"  with the network switched off correlation {samples['correlation_with_silent_network']:.3f}"
            " with the same seeds; near 1, the network does nothing",
            f"  nearest training volume       {closest['ratio']:.2f} of the usual distance "
            f"({closest['training_volume']}); {samples['num_memorised']} are near-duplicates",
            "",
            "held-out volumes have 1; good samples are near the reconstructions, not near a Gaussian",
            f"{'':<33}gradients  edge kurtosis",
        ]
        shown = {"samples": samples, **results["anchors"]}
        for name, values in shown.items():
            gradients, kurtosis = values["sharpness"]["gradient_magnitude"], values["laplacian_kurtosis"]
            lines.append(f"  {name:<30} {gradients:9.2f} {kurtosis:14.2f}")
        if "fid" in results:
            protocol = results["fid"]["protocol"]
            lines += ["", f"{protocol} against held-out volumes: training volumes show what real ones have"]
            lines.append(f"{'':<33}FID, 95 %                    KID, 95 %")
            for name, values in shown.items():
                fid, kid = (_with_interval(values, *form) for form in (("fid", ".2f"), ("kid", ".3g")))
                lines.append(f"  {name:<30} {fid:<28} {kid}")
    return "\n".join(lines)


def _with_interval(values: dict[str, Any], name: str, form: str) -> str:
    low, high = values[f"{name}_interval"]
    return f"{values[name]:{form}} ({low:{form}} to {high:{form}})"


if __name__ == "__main__":
    sys.exit(run(main, parse()))
