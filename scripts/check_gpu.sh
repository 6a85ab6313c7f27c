#!/usr/bin/env bash
# Sets up the environment, measures the GPU for at most 200 seconds, leaves what it found in check_gpu.md (one file to
# paste into a report: peaks and times beside their predictions), and runs the tests that need a CUDA device.
# Arguments go to pytest, and then nothing is measured: bash scripts/check_gpu.sh -k gradients
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh requirements-dev.txt

if ! found="$(python -c 'import sys, torch; print(torch.__version__); sys.exit(not torch.cuda.is_available())')"; then
    echo "error: torch ${found:-} sees no CUDA device; this check needs one; try nvidia-smi, and install torch built for your driver" >&2
    exit 2
fi
if [ $# -eq 0 ]; then
    python -m evaluation.gpu_check --out check_gpu.md --seconds 200
fi
python -m pytest -m gpu tests/gpu tests/models/lean/norm/test_norm_gpu.py "$@"
