#!/usr/bin/env bash
# Sets up the environment, then runs linter, formatter, type checker and tests. Works from any directory.
# Arguments go to pytest, for example: bash scripts/test.sh tests/settings -k nearest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh requirements-dev.txt

ruff check .
ruff format --check --quiet .
mypy .
# One thread per process and one process per core, because the tests' shapes are too small to gain from more threads.
OMP_NUM_THREADS=1 python -m pytest -n "$(nproc)" "$@"
if [ $# -eq 0 ]; then
    bash scripts/test_other_pythons.sh
fi
