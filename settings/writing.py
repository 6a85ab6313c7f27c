"""Settings as YAML: complete for a run folder, with the origin of each value, or as short as a preset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from settings.load import known_keys, load_settings
from settings.root import Settings
from settings.section import assign, is_section, look_up, overlap
from settings.yaml_reader import read_document, value_text

_TRAINING = "autoencoder.training"
SHOWN = (
    "name",
    *(f"data.{key}" for key in ("source", "voxel_size", "intensity", "patch_size", "prepared")),
    *("autoencoder.num_channels", "autoencoder.num_res_blocks", "autoencoder.latent_channels"),
    *("autoencoder.norm_num_groups", "autoencoder.attention_levels"),
    *(f"{_TRAINING}.batch_size", f"{_TRAINING}.gradient_accumulation_steps"),
    *(f"{_TRAINING}.use_gradient_checkpointing", f"{_TRAINING}.checkpoint_levels"),
    *(f"{_TRAINING}.use_gradient_checkpointing_offload", f"{_TRAINING}.slab_rows"),
    *(f"{_TRAINING}.reconstruction_loss", f"{_TRAINING}.kl_weight", f"{_TRAINING}.use_perceptual_loss"),
    *(f"{_TRAINING}.perceptual_weight", f"{_TRAINING}.perceptual.network", f"{_TRAINING}.perceptual.chunk_size"),
    *(f"{_TRAINING}.adversarial_weight", f"{_TRAINING}.adversarial_start_step", f"{_TRAINING}.discriminator"),
    *(f"{_TRAINING}.learning_rate", f"{_TRAINING}.max_steps"),
    *("ldm.unet.num_channels", "ldm.unet.num_res_blocks", "ldm.unet.attention_levels"),
    *("ldm.training.batch_size", "ldm.training.gradient_accumulation_steps"),
    *("ldm.training.use_gradient_checkpointing", "ldm.training.learning_rate", "ldm.training.max_steps"),
    *("ldm.sampling.sampler", "ldm.sampling.num_inference_steps"),
    *("device.mixed_precision", "device.amp_dtype"),
)
"""What every preset shows, in this order; a section stands for all of its keys."""

COMMENT_COLUMN = 40
Comment = Callable[[str, Any], str]
"""Returns the comment of a key, from its dotted name and its field; empty: none."""


def dump_yaml(settings: Settings) -> str:
    """Return every key for a run folder, from which `load_settings` restores equal settings; marks non-defaults."""
    defaults = Settings()

    def comment(dotted: str, field: Any) -> str:
        default = look_up(defaults, dotted)
        return "" if dotted == "name" or default == look_up(settings, dotted) else f"default: {value_text(default)}"

    head = "# The complete settings of this run; those that are not the default say so.\n"
    return head + yaml_text(settings, _leaves(), comment)


def dump_with_origins(path: str | Path, overrides: Sequence[str]) -> str:
    """Return every key of a config with where its value comes from: default, file or command line."""
    settings = load_settings(path, overrides)
    lines = read_document(Path(path)).lines
    overridden = [override.partition("=")[0] for override in overrides]

    def origin(dotted: str, field: Any) -> str:
        if any(overlap(dotted, key) for key in overridden):
            return "command line"
        if dotted == "data.prepared" and "data.cache_rate" in lines:
            dotted = "data.cache_rate"
        if dotted in lines:
            return f"{Path(path).name}, line {lines[dotted]}"
        return "name of the file" if dotted == "name" else "default"

    return yaml_text(settings, _leaves(), origin)


def dump_short(settings: Settings, comment: Comment = lambda dotted, field: "") -> str:
    """Return what every preset shows, and every other key that is not the default."""
    defaults = Settings()
    leaves = list(_leaves())
    shown = [leaf for key in SHOWN for leaf in leaves if overlap(leaf, key)]
    others = [leaf for leaf in leaves if leaf not in shown and look_up(settings, leaf) != look_up(defaults, leaf)]
    return yaml_text(settings, [*shown, *others], comment)


def yaml_text(settings: Settings, keys: Iterable[str], comment: Comment) -> str:
    """Return these keys as YAML, a line for each, with those of one section together."""
    tree: dict[str, Any] = {}
    for dotted in keys:
        assign(tree, dotted, dotted)
    fields = dict(known_keys())

    def lines(section: dict[str, Any], indent: str) -> Iterator[str]:
        for name, entry in section.items():
            if isinstance(entry, dict):
                yield f"{indent}{name}:" if indent else f"\n{name}:"
                yield from lines(entry, indent + "  ")
            else:
                line = f"{indent}{name}: {value_text(look_up(settings, entry))}"
                note = comment(entry, fields[entry])
                yield f"{line.ljust(COMMENT_COLUMN - 1)} # {note}" if note else line

    return "\n".join(lines(tree, "")).lstrip("\n") + "\n"


def _leaves() -> Iterator[str]:
    return (dotted for dotted, field in known_keys() if not is_section(field))
