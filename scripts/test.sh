#!/usr/bin/env bash
# Set-up and the test suite: environment, linter, formatter, type checker, tests. Works from any directory.
# Arguments go to pytest, for example: bash scripts/test.sh tests/settings -k nearest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh requirements-dev.txt

ruff check .
ruff format --check --quiet .
mypy .
# One thread a process, as many processes as cores: small shapes gain nothing from more threads.
OMP_NUM_THREADS=1 python -m pytest -n "$(nproc)" "$@"
