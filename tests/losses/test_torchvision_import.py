import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_torchvision_models_work_also_after_a_failed_import():
    script = """
try:
    import torchvision
except RuntimeError:
    pass
from losses.torchvision_import import import_torchvision
torchvision = import_torchvision()
assert import_torchvision() is torchvision
import torch, lpips
assert torchvision.models.squeezenet1_1().features(torch.zeros(1, 3, 32, 32)).shape[1] == 512
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_other_failures_are_not_swallowed(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('something else')")
    script = "from losses.torchvision_import import import_torchvision; import_torchvision()"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(REPOSITORY)!r}]; {script}"],
        capture_output=True,
        text=True,
    )
    assert "RuntimeError: something else" in result.stderr
