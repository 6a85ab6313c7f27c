"""Where training runs and in which precision."""

from __future__ import annotations

from typing import Literal

from settings.section import FREE, SAME, Section, key


class DeviceSettings(Section):
    """The `device` section."""

    type: Literal["auto", "cuda", "cpu"] = key("auto", "auto: CUDA when there is a GPU, else the CPU.", FREE)
    mixed_precision: bool = key(True, "Run convolutions and attention in 16 bits.")
    amp_dtype: Literal["auto", "bfloat16", "float16"] = key(
        "auto", "auto: bfloat16 where the device has it, else float16 with gradient scaling."
    )
    allocator: str = key(
        "expandable_segments:True",
        "Set as PYTORCH_CUDA_ALLOC_CONF before CUDA starts; empty: leave the environment as it is.",
        SAME,
        pattern=r"^$|^\w+:[^,:]+(,\w+:[^,:]+)*$",
    )
