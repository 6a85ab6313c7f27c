#!/usr/bin/env bash
# Sets up the environment, then takes at most five minutes: measures the GPU, leaves what it found in check_gpu.md (one
# file to paste into a report: peaks and times beside their predictions), and runs the tests that need a CUDA device,
# small ones first. Both say what they left out for want of time.
# Arguments go to pytest; then nothing is measured, and there is no limit: bash scripts/check_gpu.sh -k gradients
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh requirements-dev.txt

if ! found="$(python -c 'import sys, torch; print(torch.__version__); sys.exit(not torch.cuda.is_available())')"; then
    echo "error: torch ${found:-} sees no CUDA device; this check needs one; try nvidia-smi, and install torch built for your driver" >&2
    exit 2
fi
tests=(-m pytest -m gpu tests/gpu tests/models/lean/norm/test_norm_gpu.py)
if [ $# -gt 0 ]; then
    exec python "${tests[@]}" "$@"
fi
SECONDS=0
code=0
# Both commands keep to their --seconds; what hangs all the same is interrupted from outside.
timeout --foreground --signal=INT --kill-after=5 175 \
    python -m evaluation.gpu_check --out check_gpu.md --seconds 160 || code=$?
if [ $code -eq 130 ]; then
    exit $code # Ctrl-C
fi
timeout --foreground --signal=INT --kill-after=5 $((290 - SECONDS)) \
    python "${tests[@]}" --seconds $((250 - SECONDS)) || code=$?
if [ $code -eq 124 ] || [ $code -eq 137 ]; then
    echo "error: something took too long and was interrupted; what was measured before is in check_gpu.md" >&2
fi
exit $code
