#!/usr/bin/env bash
# Sets up the environment, runs the tests that need a CUDA device, and prints tables of what was measured on it: peaks
# beside their predictions, and times beside stock MONAI's. Takes a few minutes. Works from any directory.
# Arguments go to pytest, for example: bash scripts/check_gpu.sh -k peak
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh requirements-dev.txt

if ! found="$(python -c 'import sys, torch; print(torch.__version__); sys.exit(not torch.cuda.is_available())')"; then
    echo "error: torch ${found:-} sees no CUDA device; this check needs one; try nvidia-smi, and install torch built for your driver" >&2
    exit 2
fi
python -m pytest -m gpu tests/gpu tests/models/lean/norm/test_norm_gpu.py "$@"
