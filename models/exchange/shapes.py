"""Infer the settings of a network from the names and shapes of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.unet import SCAN_LAYERS
from settings import Settings, look_up
from settings.conditioning import NUM_MODALITIES

State = Mapping[str, Tensor]


def settings_of(network: str, state: State) -> dict[str, Any]:
    """Return the settings that the names and shapes of the weights imply, by dotted key.

    The number of norm groups and the channels of the U-Net's attention heads are missing, because the weights do not
    show them.
    """
    read = {"autoencoder": _autoencoder_settings, "discriminator": _discriminator_settings, "ldm": _unet_settings}
    return read[network](state)


def settings_that_differ(network: str, state: State, settings: Settings) -> list[str]:
    """Return one line for each setting that differs between the config and the weights."""
    regions = _scan_inputs_that_differ(state, settings) if network == "ldm" else []
    return [*_differences(settings_of(network, state), settings, "the weights"), *regions]


def settings_of_origin_that_differ(network: str, origin: str, settings: Settings) -> list[str]:
    """Return one line for each setting that the weights do not show but the library they come from implies."""
    if network != "autoencoder" or (origin == "maisi") == (settings.autoencoder.variant == "maisi"):
        return []
    implied = {"autoencoder.variant": "maisi" if origin == "maisi" else "monai"}
    return _differences(implied, settings, f"weights from {origin}")


def _differences(implied_settings: Mapping[str, Any], settings: Settings, where: str) -> list[str]:
    pairs = [(key, _configured(settings, key), implied) for key, implied in implied_settings.items()]
    return [
        f"{key}: {_text(configured)} in the config, {_text(implied)} in {where}; set {key}={_text(implied)}"
        for key, configured, implied in pairs
        if configured != implied
    ]


def unsupported_options(network: str, state: State) -> list[str]:
    """Return one line for each option that our networks do not support."""
    problems = []
    if any(value.dim() == 4 for value in state.values()):
        problems.append("the weights belong to a 2D network; only 3D networks are supported")
    if any(".transformer_blocks." in key for key in state):
        problems.append("the U-Net has cross-attention (with_conditioning); ours has none")
    if any(".adn.N." in key for key in state):
        problems.append("the discriminator has batch norm; ours has instance norm, which its weights do not suit")
    if network == "autoencoder" and _middle_attention(state, "encoder") != _middle_attention(state, "decoder"):
        problems.append("only one of encoder and decoder has attention in the middle; ours has it in both or in none")
    return problems


def _autoencoder_settings(state: State) -> dict[str, Any]:
    kinds = _block_kinds(state, "encoder")
    has_middle = _middle_attention(state, "encoder")
    body = kinds[1:-2]  # without the first convolution and the last norm and convolution
    body = body[:-3] if has_middle else body
    levels: list[list[tuple[str, int]]] = [[]]
    for kind, channels in body:
        if kind == "downsample":
            levels.append([])
        else:
            levels[-1].append((kind, channels))
    blocks = tuple(sum(kind == "residual" for kind, _ in level) for level in levels)
    implied: dict[str, Any] = {
        "autoencoder.strides": 2,  # MONAI has no others, and the weights would fit any
        "autoencoder.bottleneck": "kl",
        "autoencoder.in_channels": state["encoder.blocks.0.conv.weight"].shape[1],
        "autoencoder.latent_channels": state["quant_conv_mu.conv.weight"].shape[0],
        "autoencoder.num_res_blocks": blocks,
        "autoencoder.attention_levels": tuple(any(kind == "attention" for kind, _ in level) for level in levels),
        "autoencoder.use_nonlocal_attention": has_middle,
    }
    if all(blocks):
        implied["autoencoder.num_channels"] = tuple(level[0][1] for level in levels)
    return implied


def _discriminator_settings(state: State) -> dict[str, Any]:
    first = state["initial_conv.conv.weight"]
    return {
        "autoencoder.in_channels": first.shape[1],
        "autoencoder.training.discriminator.num_channels": first.shape[0],
        "autoencoder.training.discriminator.num_layers_d": sum(
            re.fullmatch(r"\d+\.conv\.weight", key) is not None for key in state
        ),
    }


def _unet_settings(state: State) -> dict[str, Any]:
    indices = sorted(int(match[1]) for key in state if (match := re.match(r"down_blocks\.(\d+)\.", key)))
    num_levels = 1 + indices[-1]  # LookupError without any, as for every other weight that is missing
    levels = [{key for key in state if key.startswith(f"down_blocks.{level}.")} for level in range(num_levels)]
    implied: dict[str, Any] = {
        "autoencoder.latent_channels": state["out.2.conv.weight"].shape[0],
        "ldm.unet.num_channels": tuple(
            state[f"down_blocks.{level}.resnets.0.conv1.conv.weight"].shape[0] for level in range(num_levels)
        ),
        "ldm.unet.num_res_blocks": tuple(
            len({match[1] for key in level if (match := re.search(r"\.resnets\.(\d+)\.", key))}) for level in levels
        ),
        "ldm.unet.use_mean_map": "mean_map" in state,
        "ldm.unet.attention_levels": tuple(any(".attentions." in key for key in level) for level in levels),
    }
    if num_levels > 1:
        implied["ldm.unet.resblock_updown"] = any(".downsampler.conv1." in key for key in state)
    embedded = state["class_embedding.weight"].shape[0] if "class_embedding.weight" in state else 0
    if is_maisi_unet(state):
        return {**implied, "ldm.conditioning.type": "none"}
    implied["ldm.conditioning.type"] = "class" if embedded else "none"
    if embedded:
        # The last class of the network stands for a hidden label.
        implied["ldm.conditioning.num_classes"] = embedded - 1
    return implied


def is_maisi_unet(state: State) -> bool:
    """Return whether a U-Net is MAISI's: its class embedding is of modalities."""
    return any(f"{layer}.0.weight" in state for layer in SCAN_LAYERS.values())


def _scan_inputs_that_differ(state: State, settings: Settings) -> list[str]:
    """Return one line for each input of MAISI's U-Net that only one of the weights and the config has."""
    scan, where = settings.ldm.conditioning.scan, "ldm.conditioning.scan"
    has_regions = any(f"{SCAN_LAYERS[name]}.0.weight" in state for name in ("top_region", "bottom_region"))
    embedded = state["class_embedding.weight"].shape[0] if "class_embedding.weight" in state else 0
    embedded = embedded if is_maisi_unet(state) else 0
    if embedded not in (0, NUM_MODALITIES):
        return [f"{where}.modality: {embedded} modalities in the weights; allowed: {NUM_MODALITIES}"]
    problems = []
    for name, configured, is_input, example in (
        ("regions", scan.regions, has_regions, "[chest, abdomen]"),
        ("modality", scan.modality, bool(embedded), "1 for CT"),
    ):
        if is_input and configured is None:
            problems.append(f"{where}.{name}: null in the config, an input of the weights; set such as {example}")
        elif configured is not None and not is_input:
            problems.append(f"{where}.{name}: given in the config, not an input of the weights; set it to null")
    return problems


def _block_kinds(state: State, coder: str) -> list[tuple[str, int]]:
    """Return the kind and the output channels of each block of the encoder or the decoder."""
    indices = sorted({int(match[1]) for key in state if (match := re.match(rf"{coder}\.blocks\.(\d+)\.", key))})
    marks = {
        "residual": "conv1.conv.weight",
        "attention": "attn.to_q.weight",
        "downsample": "conv.conv.weight",
        "upsample": "postconv.conv.weight",
        "convolution": "conv.weight",
        "norm": "weight",
    }
    kinds = []
    for index in indices:
        for kind, name in marks.items():
            if (weight := state.get(f"{coder}.blocks.{index}.{name}")) is not None:
                kinds.append((kind, weight.shape[0]))
                break
    return kinds


def _middle_attention(state: State, coder: str) -> bool:
    """Return whether the low-resolution end is a residual, an attention and another residual block.

    In a level with attention, attention follows every residual block. So a residual block with no attention after it
    belongs to the middle.
    """
    kinds = [kind for kind, _ in _block_kinds(state, coder)]
    middle = ["residual", "attention", "residual"]
    if coder == "encoder":
        return kinds[-5:-2] == middle
    return kinds[1:4] == middle and kinds[4] != "attention"


def _configured(settings: Settings, key: str) -> Any:
    resolved = {
        "autoencoder.strides": 2 if settings.autoencoder.has_stock_strides else settings.autoencoder.level_strides,
        "autoencoder.num_res_blocks": settings.autoencoder.res_blocks,
        "autoencoder.use_nonlocal_attention": settings.autoencoder.has_middle_attention,
        "ldm.unet.num_res_blocks": settings.ldm.unet.res_blocks,
    }
    return resolved[key] if key in resolved else look_up(settings, key)


def _text(value: Any) -> str:
    """Return a value as it is written in YAML and in overrides."""
    if isinstance(value, tuple):
        return f"[{','.join(_text(item) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
