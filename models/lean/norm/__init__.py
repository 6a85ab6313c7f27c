"""GroupNorm, with or without SiLU, in less memory: its layers, its operators, and their kernels for each device."""

from models.lean.norm.layers import InstanceNorm, compute_dtype, full_precision, group_norm

__all__ = ["InstanceNorm", "compute_dtype", "full_precision", "group_norm"]
