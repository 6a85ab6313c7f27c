"""Weights from and for MONAI, MONAI Generative and MAISI: read without executing code, renamed, and checked.

Our parameters have MONAI's names. Weights from MONAI are renamed only for options that our networks lack but can
express; weights for MONAI are not renamed at all, and of those for MAISI only the autoencoder's.
"""

from __future__ import annotations

import pickle
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from models.autoencoder import build_autoencoder
from models.controlnet import controlnet_arguments, parts_of
from models.discriminator import build_discriminator, discriminator_arguments
from models.stock import autoencoder_arguments
from models.unet import SCAN_LAYERS, build_unet, unet_arguments
from models.weight_files import differences, read_tensors
from runtime.files import check_regular, reason
from settings import CheckpointError, Settings
from settings.errors import AMBIGUOUS_READ_ERRORS, READ_ERRORS

State = dict[str, Tensor]
_READ_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, *AMBIGUOUS_READ_ERRORS, SafetensorError)

# Parameters that identify a network.
_MARKS = {
    "autoencoder": ("quant_conv_mu.conv.weight", "post_quant_conv.conv.weight"),
    # Before the U-Net, whose encoder it has.
    "controlnet": ("controlnet_mid_block.conv.weight", "conv_in.conv.weight"),
    "ldm": ("time_embed.0.weight", "conv_in.conv.weight"),
    "discriminator": ("initial_conv.conv.weight", "final_conv.conv.weight"),
}

# MONAI Generative 0.2.3 -> MONAI 1.6. Attention moved into a block of its own, and the convolution after upsampling was
# renamed. Networks with transformer blocks, which ours lack, are refused later under their own names.
# proj_attn is not renamed but left out: MONAI Generative creates this projection and never applies it. MONAI's own
# load_old_state_dict loads it into out_proj, which MONAI does apply, and so changes what the network computes.
_GENERATIVE_RENAMES = (
    (r"^((?!.*\.transformer_blocks\.).*)(?<!\.attn)\.(to_[qkv])\.(weight|bias)$", r"\1.attn.\2.\3"),
    (r"^(decoder\.blocks\.\d+)\.conv\.conv\.(weight|bias)$", r"\1.postconv.conv.\2"),
    (r"\.upsampler\.conv\.conv\.(weight|bias)$", r".upsampler.postconv.conv.\1"),
)

# MAISI's convolutions, which split their input, wrap MONAI's; its upsampling block has no name of its own for them.
_MAISI_RENAMES = (
    (r"^((?:en|de)coder\..*)\.conv\.conv\.(weight|bias)$", r"\1.conv.\2"),
    (r"^(decoder\.blocks\.\d+)\.conv\.conv\.(weight|bias)$", r"\1.postconv.conv.\2"),
)
_FOR_MAISI = (
    (r"^(decoder\.blocks\.\d+)\.postconv\.conv\.(weight|bias)$", r"\1.conv.conv.\2"),
    (r"^((?:en|de)coder\..*\.conv)\.(weight|bias)$", r"\1.conv.\2"),
)
ORIGINS = ("monai", "monai-generative", "maisi")


def read_foreign_weights(path: Path) -> Any:
    """Return the content of a safetensors file or a torch checkpoint; refuse pickled code without running it."""
    try:
        check_regular(path)
    except OSError as error:
        found = "no such file" if isinstance(error, FileNotFoundError) else reason(error)
        raise CheckpointError(f"{path}: {found}; give a .safetensors file or a torch checkpoint") from None
    try:
        if path.suffix == ".safetensors":
            return read_tensors(path)[0]
        return torch.load(path, map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        raise CheckpointError(
            f"{path}: cannot be read as weights ({_cause(error)}); only tensors in plain containers are read, never"
            " code; save the network's state_dict() by itself"
        ) from None


def _cause(error: Exception) -> str:
    """Return why a file cannot be read, without torch's advice to run the code in it."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, pickle.UnpicklingError):
        refused = re.search(r"GLOBAL (\S+) was not an allowed", text)
        return f"it holds {refused[1]}" if refused else "it holds other objects than tensors"
    return text.splitlines()[0]


def find_state(content: Any, path: Path, network: str | None = None) -> tuple[str, State]:
    """Return the name of the network in a checkpoint, and its state dict without wrappers of training loops.

    Searches nested dicts, and removes a prefix that all names share ("module.", "model.").
    """
    every = [(recognise(state), state) for state in _state_dicts(content)]
    found = [(name, state) for name, state in every if name is not None and network in (None, name)]
    if len(found) == 1:
        return found[0]
    wanted = network or "autoencoder, discriminator, ldm (the diffusion U-Net) or controlnet"
    if not found:
        raise CheckpointError(
            f"{path}: no weights of MONAI's AutoencoderKL, PatchDiscriminator, DiffusionModelUNet or ControlNet were "
            f"recognised; looked for: {wanted}; save the network's state_dict() by itself"
        )
    raise CheckpointError(
        f"{path}: holds several networks ({', '.join(name for name, _ in found)}); one file gives one network;"
        " choose with --network, or save the wanted state_dict() by itself"
    )


def recognise(state: Mapping[str, Tensor]) -> str | None:
    """Return the network that a state dict belongs to, or None."""
    for network, marks in _MARKS.items():
        if all(mark in state for mark in marks):
            return network
    return None


def to_our_names(state: Mapping[str, Tensor], origin: str, path: Path) -> State:
    """Return the state dict with the names of our networks (and of MONAI 1.6); `origin` is one of `ORIGINS`."""
    assert origin in ORIGINS, f"no weights come from {origin!r}"
    is_maisi = "encoder.blocks.0.conv.conv.weight" in state
    if is_maisi != (origin == "maisi") and recognise(state) == "autoencoder":
        found, fitting = ("MAISI's", "maisi") if is_maisi else ("MONAI's", "monai or monai-generative")
        raise CheckpointError(f"{path}: holds {found} autoencoder, which --from {origin} does not fit; use {fitting}")
    if origin != "maisi" and any(f"{layer}.0.weight" in state for layer in SCAN_LAYERS.values()):
        raise CheckpointError(f"{path}: holds MAISI's U-Net, which --from {origin} does not fit; use maisi")
    if origin == "maisi":
        return _expand_attention({_renamed(key, _MAISI_RENAMES): value for key, value in state.items()})
    renamed = {_renamed(key, _GENERATIVE_RENAMES): value for key, value in state.items() if ".proj_attn." not in key}
    if origin == "monai-generative":
        return _expand_attention(renamed)
    if changed := [key for key in state if key not in renamed]:
        raise CheckpointError(
            f"{path}: {changed[0]} is a name of MONAI Generative; --from monai takes weights of MONAI 1.4 or newer;"
            " use --from monai-generative"
        )
    return _expand_attention(dict(state))


def sampling_file(path: Path) -> Path:
    """Return the file beside an exported U-Net with what else sampling needs: normalisation, mean map, and so on."""
    return path.with_name(f"{path.stem}_sampling.safetensors")


def to_maisi_names(state: Mapping[str, Tensor]) -> State:
    """Return the state dict of our autoencoder with the names of MAISI's."""
    return {_renamed(key, _FOR_MAISI): value for key, value in state.items()}


def check_fit(network: str, state: Mapping[str, Tensor], settings: Settings, origin: str, path: Path) -> None:
    """Raise CheckpointError unless names and shapes are those of our network, and what they do not show fits too."""
    expected = expected_state(network, settings)
    if problems := differences(expected, state) + _hidden_differences(network, origin, settings):
        raise CheckpointError(
            "\n  ".join([f"{path}: the weights are not those of the network in the config:", *problems])
            + "\nevery parameter must be there once, in its shape; change the config to the network that was trained"
        )


def _hidden_differences(network: str, origin: str, settings: Settings) -> list[str]:
    """Return a line for each setting of an autoencoder that its weights would fit although the library has another."""
    if network != "autoencoder":
        return []
    autoencoder, wanted = settings.autoencoder, {}
    if (origin == "maisi") != (autoencoder.variant == "maisi"):
        wanted["variant"] = "maisi" if origin == "maisi" else "monai"
    if not autoencoder.has_stock_strides:
        wanted["strides"] = "2"
    if autoencoder.bottleneck != "kl":
        wanted["bottleneck"] = "kl"
    return [
        f"autoencoder.{key}: {getattr(autoencoder, key)} in the config, {value} in weights from {origin}; "
        f"set autoencoder.{key}={value}"
        for key, value in wanted.items()
    ]


def check_values(state: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError unless every weight is stored as numbers that are finite in float32."""
    for key, value in state.items():
        is_plain = value.layout == torch.strided and not value.is_meta and not value.is_nested
        if not (is_plain and value.is_floating_point() and bool(value.float().isfinite().all())):
            raise CheckpointError(
                f"{path}: {key} is not a dense tensor of finite real numbers, as every weight must be; export it again"
            )


def _renamed(key: str, renames: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


def _expand_attention(state: State) -> State:
    """Convert other forms of self-attention to ours, exactly.

    MONAI's `use_combined_linear=True` stacks query, key and value, in this order, in one matrix. Its
    `include_fc=False`, like MONAI Generative, has no output projection, which equals projecting with the identity.
    """
    result: State = {}
    for key, value in state.items():
        match = re.fullmatch(r"(.*\.attn)\.qkv\.(weight|bias)", key)
        # What has another shape keeps its name and is refused later.
        if match and value.dim() and value.shape[0] % 3 == 0:
            for name, part in zip("qkv", value.chunk(3), strict=True):
                result[f"{match[1]}.to_{name}.{match[2]}"] = part.clone()
        else:
            result[key] = value
    for key in [key for key, value in result.items() if key.endswith(".attn.to_q.weight") and value.dim() == 2]:
        block = key.removesuffix(".to_q.weight")
        channels = result[key].shape[0]
        for name in ("to_q", "to_k", "to_v"):
            result.setdefault(f"{block}.{name}.bias", torch.zeros_like(result[key][:, 0]))
        if f"{block}.out_proj.weight" not in result:
            result[f"{block}.out_proj.weight"] = torch.eye(channels, dtype=result[key].dtype)
            result[f"{block}.out_proj.bias"] = torch.zeros(channels, dtype=result[key].dtype)
    return result


def _state_dicts(content: Any) -> Iterator[State]:
    """Yield every dict that has tensors; a dict that is in several places, or in itself, counts once."""
    left, seen = deque([content]), set()
    while left:
        found = left.popleft()
        if not isinstance(found, Mapping) or id(found) in seen:
            continue
        seen.add(id(found))
        tensors = {str(key): value for key, value in found.items() if isinstance(value, Tensor)}
        if tensors:
            yield _without_prefix(tensors)
        left.extend(found.values())


def _without_prefix(state: State) -> State:
    while True:
        first = {key.split(".", 1)[0] for key in state}
        if recognise(state) is not None or len(first) != 1 or not all("." in key for key in state):
            return state
        state = {key.split(".", 1)[1]: value for key, value in state.items()}


CLASSES = {
    "autoencoder": "AutoencoderKL",
    "discriminator": "PatchDiscriminator",
    "ldm": "DiffusionModelUNet",
    "controlnet": "ControlNet",
}


def monai_arguments(network: str, settings: Settings) -> dict[str, Any]:
    """Return the arguments with which MONAI's class builds the network; raise `CheckpointError` if it cannot."""
    if network == "discriminator":
        return discriminator_arguments(settings.autoencoder)
    if network == "autoencoder":
        s, arguments = settings.autoencoder, autoencoder_arguments(settings.autoencoder)
        _check_export(
            s.has_stock_strides, f"autoencoder.strides: {list(map(list, s.level_strides))}", "has strides of 2"
        )
        _check_export(s.bottleneck == "kl", f"autoencoder.bottleneck: {s.bottleneck}", "cannot quantise its latent")
        # Splits of volumes, which save memory, must fit the grid; one always does.
        options: dict[str, Any] = {"num_splits": 1}
    else:
        conditioning = settings.ldm.conditioning
        arguments = unet_arguments(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape)
        if network == "controlnet":
            arguments, options = controlnet_arguments(arguments, conditioning.label_map.controlnet), {}
        else:
            assert network == "ldm", f"no network is called {network!r}"
            numbers = ", ".join(conditioning.embedded_numbers)
            _check_export(not numbers, f"ldm.conditioning: {numbers}", "takes no numbers", "DiffusionModelUNet")
            layers = [SCAN_LAYERS[name].removesuffix("_layer") for name in conditioning.scan.inputs]
            options = {f"include_{layer}_input": True for layer in layers}
    if not is_maisi(network, settings):
        return arguments
    return {"num_channels": arguments.pop("channels"), **arguments, "include_fc": True, **options}


def _check_export(can: bool, value: str, theirs: str, name: str = "AutoencoderKL") -> None:
    if not can:
        raise CheckpointError(f"{value}; MONAI's {name} {theirs}; networks trained with this cannot be exported")


def is_maisi(network: str, settings: Settings) -> bool:
    """Return whether MONAI's class is MAISI's: a U-Net that takes inputs of scans, an autoencoder that interpolates."""
    if network == "autoencoder":
        return settings.autoencoder.upsampling == "trilinear"
    return network in ("ldm", "controlnet") and bool(settings.ldm.conditioning.scan.inputs)


def monai_class(network: str, settings: Settings) -> type[nn.Module]:
    """Return MONAI's class of a network."""
    if is_maisi(network, settings):
        from monai.apps.generation.maisi.networks.autoencoderkl_maisi import AutoencoderKlMaisi
        from monai.apps.generation.maisi.networks.controlnet_maisi import ControlNetMaisi
        from monai.apps.generation.maisi.networks.diffusion_model_unet_maisi import DiffusionModelUNetMaisi

        return {"autoencoder": AutoencoderKlMaisi, "ldm": DiffusionModelUNetMaisi, "controlnet": ControlNetMaisi}[
            network
        ]
    import monai.networks.nets

    return getattr(monai.networks.nets, CLASSES[network])


def stock_network(network: str, settings: Settings) -> nn.Module:
    """Build MONAI's own network."""
    return monai_class(network, settings)(**monai_arguments(network, settings))


def expected_state(network: str, settings: Settings) -> dict[str, Tensor]:
    """Return the state dict of our network on the meta device: names and shapes without values."""
    with torch.device("meta"):
        if network in ("ldm", "controlnet"):
            unet = build_unet(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape)
            return parts_of(unet.state_dict())[network]
        if network == "discriminator":
            return build_discriminator(settings.autoencoder).state_dict()
        return build_autoencoder(settings.autoencoder).state_dict()


OPEN = "NVIDIA Open Model License"
ACADEMIC = "NVIDIA OneWay Non-Commercial License, for academic research"
UNKNOWN = "not known here; see where the file comes from"


class Published(NamedTuple):
    """Weights that someone published."""

    name: str
    source: str
    licence: str


_CT, _MR = "huggingface.co/nvidia/NV-Generate-CT", "huggingface.co/nvidia/NV-Generate-MR"
_BRAIN = "huggingface.co/nvidia/NV-Generate-MR-Brain"
FILES = {
    "autoencoder_v1": Published("MAISI, autoencoder of CT and MR", _CT, OPEN),
    "autoencoder_v2": Published("MAISI, autoencoder of MR", _MR, ACADEMIC),
    "controlnet_3d_ddpm-ct": Published("MAISI, ControlNet of CT", _CT, OPEN),
    "controlnet_3d_rflow-ct": Published("MAISI, ControlNet of CT", _CT, OPEN),
    "diff_unet_3d_ddpm-ct": Published("MAISI, U-Net of CT", _CT, OPEN),
    "diff_unet_3d_rflow-ct": Published("MAISI, U-Net of CT", _CT, OPEN),
    "diff_unet_3d_rflow-mr-brain": Published("MAISI, U-Net of brain MR", _BRAIN, OPEN),
    "diff_unet_3d_rflow-mr": Published("MAISI, U-Net of MR", _MR, ACADEMIC),
}
"""By how the names of files begin; of several the longest counts."""


def published(file_name: str) -> Published | None:
    """Return what is known of a file of this name; weights under another name are not recognised."""
    fitting = [start for start in FILES if file_name.startswith(start)]
    return FILES[max(fitting, key=len)] if fitting else None
