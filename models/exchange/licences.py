"""What is known of published weights: their name, their source and the licence that they come under."""

from __future__ import annotations

from dataclasses import dataclass

OPEN = "NVIDIA Open Model License"
ACADEMIC = "NVIDIA OneWay Non-Commercial License, for academic research"
UNKNOWN = "not known here; see where the file comes from"


@dataclass(frozen=True)
class Published:
    """Weights that someone published."""

    name: str
    source: str
    licence: str


_CT, _MR = "huggingface.co/nvidia/NV-Generate-CT", "huggingface.co/nvidia/NV-Generate-MR"
_BRAIN = "github.com/NVIDIA-Medtech/NV-Generate-CTMR"
FILES = {
    "autoencoder_v1": Published("MAISI, autoencoder of CT", _CT, OPEN),
    "autoencoder_v2": Published("MAISI, autoencoder of MR", _MR, ACADEMIC),
    "diff_unet_3d_rflow-ct": Published("MAISI, U-Net of CT", _CT, OPEN),
    "diff_unet_3d_rflow-mr-brain": Published("MAISI, U-Net of brain MR", _BRAIN, OPEN),
    "diff_unet_3d_rflow-mr": Published("MAISI, U-Net of MR", _MR, ACADEMIC),
}
"""By how the names of files begin; of several the longest counts."""


def published(file_name: str) -> Published | None:
    """Return what is known of a file of this name; weights under another name are not recognised."""
    fitting = [start for start in FILES if file_name.startswith(start)]
    return FILES[max(fitting, key=len)] if fitting else None
