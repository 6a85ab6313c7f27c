"""The objectives of stage 1: reconstruction, KL, adversarial and perceptual terms, all computed in fp32."""

from losses.lpips_slices import LpipsSlices
from losses.medicalnet import MedicalNetDistance
from losses.pieces import FrozenTerm
from losses.structural import StructuralDistance
from losses.weights import FILES, find_weights
from settings import AutoencoderTraining


def ensure_perceptual_weights(training: AutoencoderTraining) -> None:
    """Find or download the file that the perceptual term needs, if any.

    Commands call this first, so that a missing file raises its ConfigError before anything slow runs.
    """
    if training.use_perceptual_loss and training.perceptual.network in FILES:
        find_weights(training.perceptual.network, training.perceptual.weights)


def build_perceptual_loss(training: AutoencoderTraining, seed: int, load_weights: bool = True) -> FrozenTerm | None:
    """Return the frozen perceptual term, called as `term(reconstruction, target, step)`, or None if it is off.

    Volumes are in [-1, 1] with any number of channels, each compared on its own; the result is an fp32 scalar. With
    `load_weights=False` the network is built without reading a file, to predict memory. Raise ConfigError if the
    weights are missing and cannot be downloaded.
    """
    if not training.use_perceptual_loss:
        return None
    perceptual = training.perceptual
    if perceptual.network.startswith("lpips-"):
        return LpipsSlices(perceptual, seed, load_weights)
    if perceptual.network == "structural":
        return StructuralDistance()
    return MedicalNetDistance(perceptual.weights, load_weights)
