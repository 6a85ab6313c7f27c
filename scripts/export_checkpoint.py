"""Export the weights of a run so that stock MONAI loads them with strict=True."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import check_output_file, parser, run
from settings import CheckpointError, Settings, restored

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".safetensors", ".pt", ".pth")


def main(options: argparse.Namespace) -> None:
    """Check that MONAI's network loads the weights, write them, and print the code that loads them."""
    source, destination = Path(options.weights), Path(options.out)
    check_output_file(options.out, "--out", [options.weights])
    if destination.suffix not in SUFFIXES:
        raise CheckpointError(
            f"--out: {destination} has another suffix; allowed: {', '.join(SUFFIXES)}; choose one of them"
        )
    from models.controlnet import parts_of
    from models.exchange import CLASSES
    from models.weight_files import load_weights

    state, metadata = load_weights(source)
    if metadata.get("stage") not in list(CLASSES) or not isinstance(metadata.get("settings"), dict):
        raise CheckpointError(
            f"{source}: not weights of a run, because they name no stage and settings; give a file from a run folder"
        )
    network, settings = metadata["stage"], restored(metadata["settings"], source)
    parts = parts_of(state)
    state = parts["ldm"] if network == "ldm" else state
    mean_map = state.pop("mean_map", None)
    print(f"import {'safetensors.torch' if destination.suffix == '.safetensors' else 'torch'}")
    _write(network, state, destination, source, settings, metadata)
    if parts["controlnet"]:
        beside = destination.with_name(f"{destination.stem}_controlnet{destination.suffix}")
        _write("controlnet", parts["controlnet"], beside, source, settings, metadata)
        print("# Its outputs are the U-Net's down_block_additional_residuals and mid_block_additional_residual.")
        print("# controlnet_cond is the label map on the volume's grid as 8 channels: its bits, the lowest first.")
    if network == "autoencoder":
        ends = "[-1, 1]" if settings.autoencoder.value_range == "symmetric" else "[0, 1]"
        print(f"# It takes and returns volumes with intensities scaled to {ends}.")
    if "licence" in metadata:
        print(f"# Licence of the weights, or of those that they were fine-tuned from: {metadata['licence']}.")
    if network == "ldm" and "latent_scale" in metadata:
        values = _sampling(destination, settings, metadata, mean_map)
        print(f"# {values}: what else sampling needs; docs/examples/sample_with_monai.py does it with MONAI alone.")
    if "latent_scale" in metadata and "latent_mean" in metadata:
        scale, mean = metadata["latent_scale"], metadata["latent_mean"]
        is_plain = not mean.any() and (scale == scale[0]).all()
        plain = f"the autoencoder's latents times {float(scale[0]):.7g}." if is_plain else ""
        print(f"# It takes {plain or '(latent - mean) * scale: latent_mean and latent_scale in that file.'}")
    if mean_map is not None:
        print("# Its last input channels are the mean map, concatenated to every latent: mean_map in that file.")


def _write(
    network: str, state: dict[str, Tensor], path: Path, source: Path, settings: Settings, metadata: dict[str, Any]
) -> None:
    """Check that MONAI's network loads the weights, write them, and print the code that builds and loads it."""
    import torch

    from models.exchange import is_maisi, monai_arguments, monai_class, stock_network, to_maisi_names
    from models.weight_files import save_weights
    from runtime.files import replacing

    kind = monai_class(network, settings)
    if network == "autoencoder" and is_maisi(network, settings):
        state = to_maisi_names(state)
    # The submodules of monai.networks.nets are its own business.
    module = "monai.networks.nets" if kind.__module__.startswith("monai.networks.nets") else kind.__module__
    name = kind.__name__
    try:
        with torch.device("meta"):
            stock_network(network, settings).load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{source}: MONAI's {name} rejects these weights ({str(error).splitlines()[-1].strip()});"
            " levels with num_res_blocks 0 that change the number of channels exist only here and cannot be exported"
        ) from None
    arguments = monai_arguments(network, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_safetensors = path.suffix == ".safetensors"
    if is_safetensors:
        licence = {"licence": metadata["licence"]} if "licence" in metadata else {}
        save_weights(path, state, {"class": name, "arguments": arguments, **licence})
    else:
        with replacing(path) as temporary:
            torch.save(state, temporary)
    variable = "controlnet" if network == "controlnet" else "network"
    read = "safetensors.torch.load_file" if is_safetensors else "torch.load"
    print(f"from {module} import {name}")
    print(f"{variable} = {name}(**{json.loads(json.dumps(arguments))})")
    print(f"{variable}.load_state_dict({read}({str(path)!r}), strict=True)")


def _sampling(destination: Path, settings: Settings, metadata: dict[str, Any], mean_map: Tensor | None) -> Path:
    """Write what sampling needs besides the networks: normalisation, noise process, sampler, grid and intensities."""
    from models.exchange import sampling_file
    from models.weight_files import write_tensors

    tensors = {"latent_scale": metadata["latent_scale"], "latent_mean": metadata["latent_mean"]}
    values = {
        "scheduler": settings.ldm.scheduler.model_dump(),
        "sampling": settings.ldm.sampling.model_dump(),
        "latent_shape": settings.latent_shape,
        "multiple": settings.ldm.unet.downsampling,
        "conditioning": settings.ldm.conditioning.type if settings.ldm.conditioning.is_used else "none",
        "num_classes": settings.ldm.conditioning.num_classes,
        "value_range": [-1, 1] if settings.autoencoder.value_range == "symmetric" else [0, 1],
        # Imported weights do not know their training volumes.
        "lower": metadata.get("lower", [0.0] * settings.autoencoder.in_channels),
        "upper": metadata.get("upper", [1.0] * settings.autoencoder.in_channels),
        "spacing_mm": metadata.get("spacing_mm", [1.0, 1.0, 1.0]),
    }
    # What an import gives back to the run.
    values |= {name: metadata[name] for name in ("autoencoder", "licence") if name in metadata}
    path = sampling_file(destination)
    texts = {name: json.dumps(value) for name, value in values.items()}
    write_tensors(path, tensors if mean_map is None else {**tensors, "mean_map": mean_map}, texts)
    return path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        ["python scripts/export_checkpoint.py --weights runs/high_res/autoencoder.safetensors --out autoencoder.pt"],
    )
    result.add_argument("--weights", required=True, metavar="FILE", help="a .safetensors file of a run folder")
    result.add_argument("--out", required=True, metavar="FILE", help="a .safetensors, .pt or .pth file to write")
    return result.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(main, parse()))
