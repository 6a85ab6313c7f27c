"""Import MONAI quickly, without the optional packages for pictures, plots and statistics.

MONAI imports matplotlib, pandas, scikit-learn, SciPy, torchvision and others if they are installed, which takes most of
its import time (measured: 2.9 s with them, 0.5 s without) whenever a command starts. Nothing in this project uses the
parts of MONAI that need them. So they are hidden while MONAI is imported: Python treats a module whose entry in
`sys.modules` is None as not installed. Afterwards the entries are removed, and the packages can be imported as usual.
"""

from __future__ import annotations

import sys

EXTRAS = (
    *("PIL", "lpips", "matplotlib", "pandas", "pydicom", "requests", "skimage", "sklearn", "tensorboard"),
    *("torchvision", "scipy", "scipy.ndimage", "scipy.optimize", "scipy.signal", "scipy.stats"),
)


def import_monai() -> None:
    """Import MONAI without its optional packages; do nothing if it is already imported."""
    hidden = [name for name in EXTRAS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        import monai  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


import_monai()
