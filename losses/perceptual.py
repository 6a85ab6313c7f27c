"""Chooses the perceptual term that the settings ask for."""

from losses.lpips_slices import LpipsSlices
from losses.medicalnet import MedicalNetDistance
from losses.pieces import FrozenTerm
from losses.structural import StructuralDistance
from losses.weights import FILES, find_weights
from settings import AutoencoderTraining


def ensure_perceptual_weights(training: AutoencoderTraining) -> None:
    """Find or download the file that the perceptual term needs, if it needs one.

    For the start of a command, before anything slow: raises the ConfigError that building the term would raise.
    """
    if training.use_perceptual_loss and training.perceptual.network in FILES:
        find_weights(training.perceptual.network, training.perceptual.weights)


def build_perceptual_loss(
    training: AutoencoderTraining, in_channels: int, seed: int, load_weights: bool = True
) -> FrozenTerm | None:
    """The frozen perceptual term, called as `term(reconstruction, target, step)`, or None when it is switched off.

    Volumes are in [-1, 1], any number of channels, each compared on its own; the result is an fp32 scalar. With
    `load_weights=False` the same network is built without reading a file, for predicting memory. Raises ConfigError
    when the weights are neither here nor to be had.
    """
    if not training.use_perceptual_loss:
        return None
    perceptual = training.perceptual
    family, _, trunk = perceptual.network.partition("-")
    if family == "lpips":
        return LpipsSlices(
            trunk,
            seed=seed,
            slice_fraction=perceptual.slice_fraction,
            chunk_size=perceptual.chunk_size,
            weights=perceptual.weights,
            load_weights=load_weights,
        )
    if family == "medicalnet":
        return MedicalNetDistance(weights=perceptual.weights, load_weights=load_weights)
    assert family == "structural", f"no perceptual network is called {perceptual.network!r}"
    return StructuralDistance()
