"""How much memory cuBLAS may keep for its matrix products."""

from __future__ import annotations

import os
import re

_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_SMALL = ":4096:2:16:8"  # KiB and how often: torch's own choice for most GPUs, ample for products as small as ours
_SET_BY_MONAI = ":4096:8"  # on import, unless the user has set the variable


def workspace_config() -> str:
    """Return the sizes that cuBLAS is to use: the user's from the environment, or small ones.

    MONAI would have it keep 32 MiB for each thread, a tenth of our leanest steps. Whether the user asked for the same
    cannot be told, so that counts as MONAI's.
    """
    found = os.environ.get(_VARIABLE, "")
    return _SMALL if found in ("", _SET_BY_MONAI) else found


def limit_workspaces() -> None:
    """Have cuBLAS use `workspace_config()`; torch reads it at the first matrix product."""
    os.environ[_VARIABLE] = workspace_config()


def workspace_bytes() -> int:
    """Return what each thread that multiplies matrices on a GPU keeps; torch replaces a text without sizes likewise."""
    sizes = re.findall(r":(\d+):(\d+)", workspace_config()) or re.findall(r":(\d+):(\d+)", _SMALL)
    return sum(int(kib) * int(count) for kib, count in sizes) << 10
