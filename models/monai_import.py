"""Import MONAI without the packages for plots and statistics that it loads wherever it finds them.

They take two of the three seconds that the import takes, and nothing here uses what MONAI does with them. Others may:
once MONAI is imported, they can be imported again.
"""

from __future__ import annotations

import sys

EXTRAS = ("matplotlib", "pandas", "scipy.optimize", "scipy.signal", "scipy.stats", "sklearn")


def import_monai() -> None:
    """Import MONAI; where it is imported already, do nothing."""
    hidden = [name for name in EXTRAS if name not in sys.modules]
    # To Python, a module that is None is one that is not installed; MONAI then does without.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        import monai  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


import_monai()
