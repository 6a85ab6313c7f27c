"""Networks and their builders."""

import models.monai_import  # first: the others import MONAI

# isort: split
from models.autoencoder import LeanAutoencoder, build_autoencoder
from models.discriminator import build_discriminator
from models.haar_start import start_as_haar_transform
from models.lean.checkpointing import gradient_checkpoint_forward
from models.stock import StockAutoencoder
from models.unet import DiffusionUNet, build_unet

__all__ = [
    "DiffusionUNet",
    "LeanAutoencoder",
    "StockAutoencoder",
    "build_autoencoder",
    "build_discriminator",
    "build_unet",
    "gradient_checkpoint_forward",
    "start_as_haar_transform",
]
