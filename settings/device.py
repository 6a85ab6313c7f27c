"""Device and precision."""

from __future__ import annotations

from typing import Literal

from settings.section import FREE, SAME, Section, key


class DeviceSettings(Section):
    """The `device` section."""

    type: Literal["auto", "cuda", "cpu"] = key("auto", "auto: CUDA if available, else the CPU.", FREE)
    mixed_precision: bool = key(True, "Run convolutions and attention in 16-bit precision.")
    amp_dtype: Literal["auto", "bfloat16", "float16"] = key(
        "auto", "auto: bfloat16 if the device supports it, else float16 with gradient scaling."
    )
    allocator: str = key(
        "expandable_segments:True",
        "Value of PYTORCH_CUDA_ALLOC_CONF, set before CUDA starts; empty: do not set it.",
        SAME,
        pattern=r"^$|^\w+:[^,:]+(,\w+:[^,:]+)*$",
    )
