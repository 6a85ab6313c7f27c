"""Latents of a quantising autoencoder (vq) as files of integers, from which volumes are decoded again.

Stage 2 trains on latents before they are quantised, so it does not use these files: they are for keeping volumes.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data import NETWORK_RANGE, LoadedVolume
from models.bottleneck import VectorQuantiser
from models.frozen_autoencoder import weights_digest
from models.volume_codec import VolumeCodec
from runtime.files.atomic import replacing
from runtime.files.names import printable
from settings import DataError, UserError

SUFFIX = "_codes.npz"


@dataclass(frozen=True)
class Codes:
    """The codes of one volume, uint8 to uint32 (D, H, W), its place in space, and the intensities of each channel."""

    codes: np.ndarray
    affine: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    @classmethod
    def of(cls, mean: Tensor, loaded: LoadedVolume, codec: VolumeCodec) -> Codes:
        """Return the codes of the latent (C, D, H, W) of a volume."""
        quantiser = quantiser_of(codec)
        codes = quantiser.codes(mean[None])[0].cpu().numpy().astype(np.min_scalar_type(quantiser.num_codes - 1))
        return cls(codes, loaded.geometry.grid_affine, np.array(loaded.lower), np.array(loaded.upper))

    def decode(self, codec: VolumeCodec) -> Tensor:
        """Return the volume (C, D, H, W) in the network's range, the same to the bit as without codes."""
        codes = torch.from_numpy(self.codes.astype(np.int64)).to(codec.precision.device)
        return codec.decode(quantiser_of(codec).embed(codes[None])[0])

    def intensities(self, volume: Tensor) -> np.ndarray:
        """Return a decoded volume in the intensities of the file that was encoded."""
        lower, upper = (ends.astype(np.float32)[:, None, None, None] for ends in (self.lower, self.upper))
        low, high = NETWORK_RANGE
        return (volume.cpu().numpy() - low) / (high - low) * (upper - lower) + lower

    def describe(self, latent: Tensor) -> str:
        """Return the bytes of the codes, and what the latent takes as it is."""
        return (
            f"{self.codes.nbytes:,} bytes as {self.codes.dtype}; the latent takes {4 * latent.numel():,} in float32 "
            f"and {2 * latent.numel():,} in 16 bits"
        )

    def write(self, path: Path, codec: VolumeCodec) -> None:
        """Write the codes with the hash of the autoencoder that they belong to."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, Path(temporary).open("wb") as file:
            np.savez(file, **vars(self), autoencoder=np.array(weights_digest(codec.autoencoder)))

    @classmethod
    def read(cls, path: Path, codec: VolumeCodec) -> Codes:
        """Return the codes of a file; raise DataError if it is none, or of another autoencoder."""
        quantiser = quantiser_of(codec)
        try:
            with np.load(path, allow_pickle=False) as content:
                parts = {name: content[name] for name in ("codes", "affine", "lower", "upper", "autoencoder")}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{printable(path)}: not a file of codes ({error}); give one that --codes wrote") from None
        if str(parts.pop("autoencoder")) != weights_digest(codec.autoencoder):
            raise DataError(
                f"{printable(path)}: its codes are of an autoencoder with other weights; give the run that wrote them"
            )
        codes = parts["codes"]
        if codes.dtype.kind != "u" or codes.ndim != 3 or not codes.size or codes.max() >= quantiser.num_codes:
            raise DataError(f"{printable(path)}: damaged codes; write them again with --codes")
        return cls(**parts)


def quantiser_of(codec: VolumeCodec) -> VectorQuantiser:
    """Return the quantiser of the run's autoencoder; raise `UserError` if it has none."""
    quantiser = codec.autoencoder.quantiser
    if quantiser is None:
        raise UserError(
            "--codes: the run's autoencoder.bottleneck is kl, whose latents have no codes; allowed: vq; leave the "
            "option out"
        )
    return quantiser
