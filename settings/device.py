"""Device and precision."""

from __future__ import annotations

from typing import Literal

from settings.section import FREE, SAME, Section, key


class DeviceSettings(Section):
    """The `device` section."""

    type: Literal["auto", "cuda", "cpu"] = key("auto", "auto: CUDA if available, else the CPU.", FREE)
    mixed_precision: bool = key(False, "Run convolutions and attention in 16-bit precision.")
    amp_dtype: Literal["auto", "bfloat16", "float16"] = key(
        "auto",
        "auto: bfloat16 if the GPU supports it, else float16 with gradient scaling; on a CPU, where 16 bits are many "
        "times slower, float32.",
    )
    optimizer_states: Literal["float32", "8bit"] = key(
        "float32",
        "How Adam keeps its two moments; 8bit: with a scale for each kernel, 0.3 of the memory, slower updates.",
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = key(
        "auto", "Memory layout of volumes; auto: channels_last, but contiguous for MONAI's stock autoencoder.", SAME
    )
    allocator: str = key(
        "expandable_segments:True",
        "Value of PYTORCH_CUDA_ALLOC_CONF, set before CUDA starts; empty: do not set it.",
        SAME,
        pattern=r"^$|^\w+:[^,:]+(,\w+:[^,:]+)*$",
    )

    def is_half(self, on_cpu: bool) -> bool:
        """Return whether a device computes in 16 bits; a CPU does only if `amp_dtype` names the type."""
        return self.mixed_precision and not (on_cpu and self.amp_dtype == "auto")
