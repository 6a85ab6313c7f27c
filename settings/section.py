"""The base of all sections, the types of their values, dotted keys such as data.source, and shared training keys."""

from __future__ import annotations

import copy
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Promise = Literal["same mathematics", "different mathematics", "free"]
"""What changing a key affects: only memory and time; what is learned; neither."""

SAME: Promise = "same mathematics"
DIFFERENT: Promise = "different mathematics"
FREE: Promise = "free"


class Section(BaseModel):
    """A section of the configuration; it rejects unknown keys and cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


def key(default: Any, description: str, promise: Promise = DIFFERENT, **constraints: Any) -> Any:
    """Declare a key with its default, its one-line description and its promise."""
    return Field(default, description=description, json_schema_extra={"promise": promise}, **constraints)


def section(kind: type[Section], description: str) -> Any:
    """Declare a nested section; all of its keys have defaults."""
    return Field(default_factory=kind, description=description)


def _split(value: Any) -> Any:
    """Return text such as 64x64x32 or 64,64,32 as a list of numbers."""
    try:
        parts = value.replace("x", ",").replace("\u00d7", ",").split(",")
        return [int(part) if part.strip().isdecimal() else float(part) for part in parts]
    except (AttributeError, ValueError):
        return value


# Far above any real network: an obvious mistake is rejected before it exhausts the memory.
LARGEST_AXIS = 2**16
MOST_LEVELS = 12
MOST_STEPS = 2**31 - 1

# YAML has lists and frozen settings hold tuples, so the container is converted; its elements are checked strictly.
Entry = TypeVar("Entry")
PerChannel = Annotated[tuple[Entry, ...], Field(strict=False, min_length=1, max_length=1024)]
PerLevel = Annotated[
    tuple[Entry, ...], Field(strict=False, min_length=1, max_length=MOST_LEVELS), BeforeValidator(_split)
]
PerAxis = Annotated[tuple[Entry, ...], Field(strict=False, min_length=3, max_length=3), BeforeValidator(_split)]
Triple = PerAxis[Annotated[int, Field(ge=1, le=LARGEST_AXIS)]]
TripleMm = PerAxis[Annotated[float, Field(ge=1e-6, le=1e6)]]
Channels = Annotated[int, Field(ge=1, le=2**16)]
Blocks = Annotated[int, Field(ge=1, le=64)]
BlocksOrZero = Annotated[int, Field(ge=0, le=64)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
WITHOUT_NUL = r"^[^\x00]*$"
FOLDER_NAME = r"^[\w][\w.-]*$"
# Characters of up to 4 bytes, of which a folder's name has 255 at most.
FolderName = Annotated[str, Field(min_length=1, max_length=60, pattern=FOLDER_NAME)]
PathText = Annotated[str, Field(min_length=1, max_length=4096, pattern=WITHOUT_NUL)]


def is_section(field: Any) -> bool:
    """Return whether a field of a section is itself a section."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def look_up(values: Any, dotted: str, otherwise: Any = None) -> Any:
    """Return the value of a dotted key; `otherwise` where nested dictionaries do not have it."""
    for part in dotted.split("."):
        if isinstance(values, Section):
            values = getattr(values, part)
        elif isinstance(values, dict) and part in values:
            values = values[part]
        else:
            return otherwise
    return values


def assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key in nested dictionaries, adding missing sections; raise `ValueError` if a parent is a value."""
    *parents, last = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise ValueError(f"{parent} is not a section")
    values[last] = value


def value_text(value: Any, allow_unicode: bool = False) -> str:
    """Return a value as YAML on one line."""
    options: dict[str, Any] = {"default_flow_style": True, "width": float("inf"), "allow_unicode": allow_unicode}
    text = yaml.safe_dump(plain := _plain(value), **options).removesuffix("\n").removesuffix("\n...")
    if "\n" in text:  # a line break inside a text, which only double quotes escape
        text = yaml.safe_dump(plain, **options, default_style='"').removesuffix("\n")
    return text


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value


def overlap(one: str, other: str) -> bool:
    """Return whether two dotted keys are equal or one contains the other."""
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


class NetworkSettings(Section):
    """What follows from the keys that autoencoder and U-Net share: `num_channels`, one for each level, and others."""

    fewest_channels_per_group: ClassVar[int]

    @property
    def num_groups(self: Any) -> int:
        """Return the groups of each GroupNorm; for auto the most up to 32 that divide every channel count."""
        if isinstance(self.norm_num_groups, int):
            return self.norm_num_groups
        most = max(1, min(32, min(self.num_channels) // self.fewest_channels_per_group))
        return max(n for n in range(1, most + 1) if all(c % n == 0 for c in self.num_channels))

    @property
    def res_blocks(self: Any) -> tuple[int, ...]:
        """Return the number of residual blocks of each level."""
        blocks = self.num_res_blocks
        return (blocks,) * len(self.num_channels) if isinstance(blocks, int) else blocks


class TrainingSettings(Section):
    """Training keys that both stages share."""

    batch_size: Count = key(1, "Volumes, or their latents, per micro-batch; memory grows with it.", SAME)
    gradient_accumulation_steps: Count = key(
        1,
        "Micro-batches whose gradients are summed before one update; keep its product with batch_size to keep updates.",
        SAME,
    )
    max_steps: Count = key(
        20000, "Number of updates; a run whose learning rate decays resumes only with the same number.", FREE
    )
    max_hours: Annotated[float, Field(gt=0, le=100_000)] | None = key(
        None, "Train for this many hours instead of max_steps; the learning rate decays over them.", FREE
    )
    optimizer: Literal["adam", "muon"] = key(
        "muon",
        "muon for the convolutions between layers of at least 8 channels and adam for the rest, or adam for all; muon "
        "needs fewer updates, and one state per weight instead of two. A discriminator always has adam.",
    )
    learning_rate: Rate | Literal["auto"] = key(
        1e-4,
        "Size of a step; never scaled by the number of GPUs; auto: 1e-5 for a stage that starts from `pretrained` "
        "weights, else 1e-4.",
    )
    warmup_steps: CountOrZero | Literal["auto"] = key(
        "auto",
        "Steps over which the learning rate rises linearly from zero; auto: a twentieth of max_steps, at most 200.",
    )
    learning_rate_decay: Literal["none", "cosine"] = key(
        "cosine", "Constant after the warm-up, or cosine decay to zero at max_steps."
    )
    max_grad_norm: float = key(1.0, "Gradient norm above which gradients are clipped; 0: no clipping.", ge=0)
    ema_decay: Decay | Literal["auto"] = key(
        0.0,
        "Decay of the exponential moving average of the weights, such as 0.999; 0: no average; auto: over the last "
        "twentieth of the steps so far.",
    )
    log_every: Count = key(10, "Steps between lines in metrics.jsonl.", FREE)
    validate_every: Count = key(500, "Steps between validations.", FREE)
    save_every: Count = key(
        500, "Steps between checkpoints; a run with max_hours also saves at every tenth of its time.", FREE
    )
    keep_checkpoints: int = key(2, "Number of newest checkpoints to keep, at least 2.", FREE, ge=2)
    use_gradient_checkpointing: bool = key(False, "Recompute each block's activations in the backward pass.", SAME)
    use_gradient_checkpointing_offload: bool = key(
        False, "Keep block inputs in host memory until the backward pass; implies checkpointing.", SAME
    )

    def rate_from(self, pretrained: str | None) -> float:
        """Return the size of a step of a stage that starts from `pretrained` weights, or from random ones if None."""
        if self.learning_rate == "auto":
            return 1e-4 if pretrained is None else 1e-5
        return self.learning_rate

    @property
    def checkpoints_blocks(self) -> bool:
        """Return whether blocks are checkpointed, which offloading implies."""
        return self.use_gradient_checkpointing or self.use_gradient_checkpointing_offload

    @property
    def num_warmup_steps(self) -> int:
        """Return the number of steps over which the learning rate rises."""
        return min(200, self.max_steps // 20) if self.warmup_steps == "auto" else self.warmup_steps

    @property
    def last_step(self) -> int:
        """Return the step after which the run ends in any case."""
        return self.max_steps if self.max_hours is None else MOST_STEPS

    @property
    def samples_per_rank(self) -> int:
        """Return the number of volumes that one rank processes per update."""
        return self.batch_size * self.gradient_accumulation_steps


def training_key(name: str, default: Any) -> Any:
    """Declare a key of `TrainingSettings` with another default."""
    field = copy.copy(TrainingSettings.model_fields[name])
    field.default = default
    return field
