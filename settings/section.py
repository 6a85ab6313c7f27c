"""What all sections of the configuration share: strict, frozen, and each key with its promise."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Promise = Literal["same mathematics", "different mathematics", "free"]
"""What changing a key does to a run: nothing but memory and time, something to the result, or neither of the two."""

SAME: Promise = "same mathematics"
DIFFERENT: Promise = "different mathematics"
FREE: Promise = "free"


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


def key(default: Any, description: str, promise: Promise = DIFFERENT, **constraints: Any) -> Any:
    """Declare a config key with its default, its one-line description and its promise."""
    return Field(default, description=description, json_schema_extra={"promise": promise}, **constraints)


def section(kind: type[Section], description: str) -> Any:
    """Declare a nested section whose keys all have defaults."""
    return Field(default_factory=kind, description=description)


# Far above anything that is trained, so that what cannot be meant is refused at once and not by what it takes down.
LARGEST_AXIS = 2**16
LARGEST_CHANNELS = 2**16
MOST_LEVELS = 12
MOST_BLOCKS = 64

# YAML has lists, frozen settings have tuples: the container may convert, its elements stay strict.
_OfLevels = Field(strict=False, min_length=1, max_length=MOST_LEVELS)
_OfAxes = Field(strict=False, min_length=3, max_length=3)
Triple = Annotated[tuple[Annotated[int, Field(ge=1, le=LARGEST_AXIS)], ...], _OfAxes]
TripleMm = Annotated[tuple[Annotated[float, Field(ge=1e-6, le=1e6)], ...], _OfAxes]
Channels = Annotated[int, Field(ge=1, le=LARGEST_CHANNELS)]
ChannelsPerLevel = Annotated[tuple[Channels, ...], _OfLevels]
HeadsPerLevel = Annotated[tuple[Annotated[int, Field(ge=0, le=LARGEST_CHANNELS)], ...], _OfLevels]
Blocks = Annotated[int, Field(ge=1, le=MOST_BLOCKS)]
BlocksOrZero = Annotated[int, Field(ge=0, le=MOST_BLOCKS)]
BlocksPerLevel = Annotated[tuple[Blocks, ...], _OfLevels]
BlocksPerLevelOrZero = Annotated[tuple[BlocksOrZero, ...], _OfLevels]
Flags = Annotated[tuple[bool, ...], _OfLevels]
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
WITHOUT_NUL = r"^[^\x00]*$"
PathText = Annotated[str, Field(min_length=1, max_length=4096, pattern=WITHOUT_NUL)]


def largest_common_divisor(channels: tuple[int, ...], at_most: int) -> int:
    """Return the largest number up to `at_most` that divides every channel count."""
    return max(n for n in range(1, at_most + 1) if all(c % n == 0 for c in channels))


class TrainingSettings(Section):
    """The mechanics of training that both stages have."""

    batch_size: Count = key(1, "Volumes in one micro-batch; the memory grows with it.", SAME)
    gradient_accumulation_steps: Count = key(1, "Micro-batches whose gradients are summed before one update.", SAME)
    max_steps: Count = key(
        20000, "Updates after which training ends; fixed for a run whose learning rate decays.", FREE
    )
    learning_rate: float = key(1e-4, "Adam's step size; never scaled by the number of GPUs.", gt=0)
    warmup_steps: CountOrZero = key(0, "Steps over which the learning rate rises from zero.")
    learning_rate_decay: Literal["none", "cosine"] = key("none", "Constant after the warm-up, or cosine to zero.")
    weight_decay: float = key(0.0, "Decoupled weight decay (AdamW); 0 is plain Adam.", ge=0)
    max_grad_norm: float = key(1.0, "Gradients are clipped to this norm; 0: no clipping.", ge=0)
    ema_decay: float = key(0.0, "Decay of the averaged copy of the weights; 0: no copy.", ge=0, lt=1)
    log_every: Count = key(10, "Steps between two lines in metrics.jsonl.", FREE)
    validate_every: Count = key(500, "Steps between two validations.", FREE)
    save_every: Count = key(500, "Steps between two checkpoints.", FREE)
    keep_checkpoints: int = key(2, "Newest checkpoints kept; at least two.", FREE, ge=2)
    max_skipped_steps: Count = key(20, "fp16 only: updates in a row that may overflow before the run stops.", FREE)
    use_gradient_checkpointing: bool = key(False, "Recompute each block's activations in backward.", SAME)

    @property
    def samples_per_rank(self) -> int:
        """Return how many volumes one process sees in one update."""
        return self.batch_size * self.gradient_accumulation_steps
