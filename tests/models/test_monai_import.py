"""MONAI is imported without its extras, and the extras are there for whoever wants them afterwards."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("first", ["models", "training.validation.stages", "training.validation.metrics"])
def test_extras_of_monai_are_left_out_and_can_be_imported_later(first):
    program = (
        f"import sys, {first}\n"
        "from models import EXTRAS\n"
        "own = {'pydicom', 'scipy', 'scipy.ndimage', 'PIL', 'requests'}\n"  # data/ imports them itself
        "print(sorted(set(EXTRAS) & set(sys.modules) - own))\n"
        "import tensorboard, scipy.signal, scipy.stats\n"
        "print(scipy.signal.hilbert([1.0, 2.0]).shape)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["[]", "(2,)"]
