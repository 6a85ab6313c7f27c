"""Networks and their builders.

MONAI imports matplotlib, pandas, scikit-learn, SciPy, torchvision and others if they are installed, which takes most of
its import time (measured: 2.9 s with them, 0.5 s without) whenever a command starts. Nothing in this project uses the
parts of MONAI that need them. So they are hidden while MONAI is imported: Python treats a module whose entry in
`sys.modules` is None as not installed. Afterwards the entries are removed, and the packages can be imported as usual.
"""

import sys

EXTRAS = (
    *("PIL", "lpips", "matplotlib", "pandas", "pydicom", "requests", "skimage", "sklearn", "tensorboard"),
    *("torchvision", "scipy", "scipy.ndimage", "scipy.optimize", "scipy.signal", "scipy.stats"),
)
_hidden = [name for name in EXTRAS if name not in sys.modules]
sys.modules.update(dict.fromkeys(_hidden))  # type: ignore[arg-type]
try:
    import monai
finally:
    for _name in _hidden:
        del sys.modules[_name]

# isort: split
from models.autoencoder import LeanAutoencoder, build_autoencoder  # noqa: E402
from models.discriminator import build_discriminator  # noqa: E402
from models.haar_start import start_as_haar_transform  # noqa: E402
from models.lean.checkpointing import gradient_checkpoint_forward  # noqa: E402
from models.stock import StockAutoencoder  # noqa: E402
from models.unet import DiffusionUNet, build_unet  # noqa: E402

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
