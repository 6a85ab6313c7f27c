"""The objectives of stage 1: reconstruction, KL, adversarial and perceptual terms, all computed in fp32.

Networks and their weights are imported only where a config asks for them.
"""

from losses.perceptual import FrozenTerm, StructuralDistance
from settings import AutoencoderTraining


def ensure_perceptual_weights(training: AutoencoderTraining) -> None:
    """Find or download the file that the perceptual term needs, if any.

    Commands call this first, so that a missing file raises its ConfigError before anything slow runs.
    """
    if training.use_perceptual_loss and training.perceptual.network != "structural":
        from losses.weights import find_weights

        find_weights(training.perceptual.network, training.perceptual.weights)


def build_perceptual_loss(training: AutoencoderTraining, seed: int, load_weights: bool = True) -> FrozenTerm | None:
    """Return the frozen perceptual term, called as `term(reconstruction, target, step)`, or None if it is off.

    Volumes are in [-1, 1] with any number of channels, each compared on its own; the result is an fp32 scalar. With
    `load_weights=False` the network is built without reading a file, to predict memory. Raise ConfigError if the
    weights are missing and cannot be downloaded.
    """
    perceptual = training.perceptual
    if not training.use_perceptual_loss:
        return None
    if perceptual.network == "structural":
        return StructuralDistance()
    from losses.networks import LpipsSlices, MedicalNetDistance

    if perceptual.network == "medicalnet-resnet10":
        return MedicalNetDistance(perceptual.weights, load_weights)
    return LpipsSlices(perceptual, seed, load_weights)
