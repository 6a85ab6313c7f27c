"""Import weights of MONAI's AutoencoderKL, PatchDiscriminator, DiffusionModelUNet or ControlNet, or MAISI's."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import above_zero, add_config, check_output_folder, parser, run
from runtime.files import RunFolder, write_text
from settings import CheckpointError, Settings, dump_yaml, load_settings, stored

log = logging.getLogger(__name__)


def main(options: argparse.Namespace) -> None:
    """Read the weights, rename them, check them against the config, and write them to the run folder."""
    check_output_folder(options.out)
    settings = load_settings(options.config, options.overrides)
    from diffusion.normalisation import Normalisation, pretrained_unet
    from models.controlnet import PREFIX
    from models.exchange import (
        UNKNOWN,
        check_fit,
        check_values,
        find_state,
        published,
        read_foreign_weights,
        sampling_file,
        to_our_names,
    )
    from models.frozen_autoencoder import autoencoder_path
    from models.weight_files import load_weights, save_weights
    from training.run_setup import locked

    path = Path(options.weights)
    content = read_foreign_weights(path)
    network, state = find_state(content, path, options.network)
    check_values(state, path)
    state = to_our_names(state, options.origin, path)
    beside = sampling_file(path)
    exported = load_weights(beside) if network == "ldm" and beside.exists() else ({}, {})
    if "mean_map" in exported[0] and settings.ldm.unet.use_mean_map:
        state["mean_map"] = exported[0]["mean_map"]
        check_values({"mean_map": state["mean_map"]}, beside)
    has_controlnet = bool(settings.ldm.conditioning.label_map.controlnet)
    if network == "ldm" and has_controlnet:
        raise CheckpointError(
            f"{path}: holds a U-Net alone, and the config has a ControlNet beside it; leave out "
            "ldm.conditioning.label_map, and import the ControlNet, if there is one, into another folder"
        )
    if network == "controlnet" and not has_controlnet:
        raise CheckpointError(
            f"{path}: holds a ControlNet, and the config has none; set ldm.conditioning.label_map and ldm.pretrained, "
            "the U-Net that it controls"
        )
    check_fit(network, state, settings, options.origin, path)
    timesteps, configured = _number_beside(content, "num_train_timesteps"), settings.ldm.scheduler.num_train_timesteps
    if network == "ldm" and isinstance(timesteps, int | float) and timesteps != configured:
        raise CheckpointError(
            f"{path}: was trained with {timesteps} timesteps; ldm.scheduler.num_train_timesteps is {configured}; set "
            f"ldm.scheduler.num_train_timesteps={timesteps}"
        )

    folder = RunFolder(Path(options.out))
    if folder.config.exists() and load_settings(folder.config) != settings:
        raise CheckpointError(
            f"{folder.config}: differs from the config given here; all weights in a run folder share one config;"
            " give this file as --config, or another folder as --out"
        )
    state = {key: value.float() for key, value in state.items()}
    metadata: dict[str, Any] = {"stage": network, "settings": stored(settings)}
    metadata["imported_from"] = f"{options.origin}: {path.name}"
    known = published(path.name) if options.origin == "maisi" else None
    metadata["licence"] = UNKNOWN if known is None else f"{known.licence} ({known.name}, {known.source})"
    if network == "controlnet":
        # It is nothing without its U-Net, so both are in one file.
        unet = pretrained_unet(settings)
        assert unet is not None, "a config with a ControlNet names a U-Net"
        own, of_unet = load_weights(unet.path)
        state = own | {PREFIX + key: value for key, value in state.items()}
        licences = dict.fromkeys([metadata["licence"], of_unet.get("licence", metadata["licence"])])
        metadata, network = of_unet | metadata | {"stage": "ldm", "licence": "; ".join(licences)}, "ldm"
    elif network == "ldm":
        metadata |= _sample_frame(settings)
        if exported[0] and options.latent_scale is None:
            # A run's own U-Net on its way back.
            try:
                normalisation = Normalisation.stored(exported[0], settings.autoencoder.latent_channels)
                metadata |= {name: exported[1][name] for name in ("spacing_mm", "lower", "upper")}
                metadata |= {name: exported[1][name] for name in ("autoencoder", "licence") if name in exported[1]}
            except (ValueError, LookupError) as error:
                raise CheckpointError(
                    f"{beside}: not what was exported beside {path.name} ({error}); export both again, or move it away"
                ) from None
        else:
            scale = _latent_scale(options, content, path)
            normalisation = Normalisation.uniform(settings.autoencoder.latent_channels, scale)
        metadata |= normalisation.content()
    with locked(folder):
        trained = sorted(folder.checkpoints.glob(f"{network}_step_*.pt"))
        if folder.weights(network).exists() and "imported_from" not in load_weights(folder.weights(network))[1]:
            trained.append(folder.weights(network))
        if trained:
            raise CheckpointError(
                f"{trained[-1]}: was trained here; only imported weights are replaced; give another folder as --out"
            )
        save_weights(folder.weights(network), state, metadata)
        if not folder.config.exists():
            write_text(folder.config, dump_yaml(settings))
    number = sum(value.numel() for value in state.values())
    log.info("%s: %d parameters in %d tensors", folder.weights(network), number, len(state))
    log.info("licence, as exported or by the name of the file: %s", metadata["licence"])
    for line in _not_in_the_weights(network, settings):
        log.info(line)
    places = (folder.config, folder.path, autoencoder_path(settings, folder), folder.weights("ldm"))
    config, run_folder, autoencoder, ldm = (shlex.quote(str(place)) for place in places)
    tuned = f"--config {config} name=finetuned"
    if network == "autoencoder":
        imported = shlex.quote(str(folder.weights("autoencoder")))
        log.info("next: python train_autoencoder.py %s autoencoder.pretrained=%s", tuned, imported)
    elif network == "ldm":
        log.info("next: python scripts/sample.py --run %s%s", run_folder, " --labels FILE_OR_FOLDER" * has_controlnet)
        log.info("or fine-tune: python train_ldm.py %s ldm.autoencoder=%s ldm.pretrained=%s", tuned, autoencoder, ldm)


def _not_in_the_weights(network: str, settings: Settings) -> list[str]:
    """Return a line for each setting that the weights cannot confirm, and that gives wrong results if it is wrong."""
    unet = settings.ldm.unet
    unseen: dict[str, dict[str, Any]] = {
        "autoencoder": {"autoencoder.norm_num_groups": settings.autoencoder.num_groups},
        "ldm": {
            "ldm.unet.norm_num_groups": unet.num_groups,
            "ldm.unet.num_head_channels": unet.head_channels,
            "ldm.scheduler.type": settings.ldm.scheduler.type,
        },
    }
    lines = [
        f"{key} is {value}; the weights cannot confirm this, so check that they were trained with it"
        for key, value in unseen.get(network, {}).items()
    ]
    if network != "ldm" and settings.autoencoder.value_range == "symmetric":
        lines.append("volumes are scaled to [-1, 1]; for weights trained on [0, 1] set autoencoder.variant=monai_unit")
    return lines


def _latent_scale(options: argparse.Namespace, content: Any, path: Path) -> float:
    """Return the scale of the latents in training: the option, or scale_factor beside the weights, as in MAISI."""
    scale = options.latent_scale or _number_beside(content, "scale_factor")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1e-30 < scale < 1e30:
        raise CheckpointError(
            f"{path}: its scale_factor, by which latents were multiplied in training, is {str(scale)[:40]}; "
            "a finite number above 0 is needed; give it as --latent-scale"
        )
    return float(scale)


def _number_beside(content: Any, name: str) -> Any:
    """Return what a checkpoint has under a name besides the weights, as a number if it is one; None without it."""
    from torch import Tensor

    value = content.get(name) if isinstance(content, dict) else None
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _sample_frame(settings: Settings) -> dict[str, Any]:
    """Return the spacing, intensities and classes of samples from the config; 1 mm and [0, 1] where it has none."""
    rules = [settings.data.intensity.of_channel(number) for number in range(settings.autoencoder.in_channels)]
    ends = [(lower, upper) if mode == "window" else (0.0, 1.0) for mode, lower, upper in rules]
    return {
        "spacing_mm": settings.data.spacing or (1.0, 1.0, 1.0),
        "lower": [lower for lower, _ in ends],
        "upper": [upper for _, upper in ends],
        "class_names": [str(number) for number in range(settings.ldm.conditioning.num_classes)],
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/import_checkpoint.py --from monai-generative --weights autoencoder.pth"
            " --config configs/default.yaml --out runs/imported",
            "python scripts/import_checkpoint.py --from monai --weights unet.pt --config configs/default.yaml"
            " --out runs/imported --latent-scale 0.98 ldm.unet.norm_num_groups=32",
        ],
    )
    result.add_argument(
        "--from",
        dest="origin",
        required=True,
        choices=["monai", "monai-generative", "maisi"],
        help="library that the weights come from",
    )
    result.add_argument(
        "--weights", required=True, metavar="FILE", help="a state dict, or a checkpoint that contains one"
    )
    result.add_argument("--out", required=True, metavar="DIR", help="the run folder to write to, such as runs/imported")
    result.add_argument(
        "--network",
        choices=["autoencoder", "discriminator", "ldm", "controlnet"],
        help="which network to import (default: the one in the file)",
    )
    result.add_argument(
        "--latent-scale", type=above_zero, metavar="X", help="ldm: number by which latents were multiplied in training"
    )
    add_config(result)
    return result.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(main, parse()))
