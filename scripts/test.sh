#!/usr/bin/env bash
# Set-up and the test suite: environment, linter, formatter, type checker, tests. Works from any directory.
# Arguments go to pytest, for example: bash scripts/test.sh tests/settings -k nearest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh requirements-dev.txt

ruff check .
ruff format --check --quiet .
mypy .
python -m pytest "$@"
