#!/usr/bin/env bash
# Runs the tests that need no torch on the supported Python versions other than that of .venv, where they are installed.
# Each version gets an environment of its own (.venv-3.12, ...) without torch, which would take gigabytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages="numpy scipy nibabel SimpleITK pydicom isal pydantic pyyaml tqdm psutil pytest pytest-timeout hypothesis"
tests="tests/settings tests/runtime/test_cli.py tests/runtime/test_files.py tests/data/test_volume_formats.py"
current="$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)"

find_python() {  # prints an interpreter of version $1; pyenv's shims exist even for versions that are not selected
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

pins="$(for package in $packages; do grep -hE "^$package==" requirements.txt requirements-dev.txt; done)"
wanted="$(echo "$pins" | sha256sum)"
for version in 3.11 3.12 3.13; do
    [ "$version" = "$current" ] && continue
    environment=".venv-$version"
    if [ "$(cat "$environment/.installed" 2>/dev/null)" != "$wanted" ]; then
        python="$(find_python "$version")"
        if [ -z "$python" ]; then
            echo "Python $version: not installed, so nothing was tested on it"
            continue
        fi
        # shellcheck disable=SC2086
        if ! { "$python" -m venv "$environment" && "$environment/bin/python" -m pip install --quiet $pins; } >"$environment.log" 2>&1; then
            echo "Python $version: nothing was tested on it because $environment could not be set up: $(tail -n 1 "$environment.log")"
            continue
        fi
        rm "$environment.log"
        echo "$wanted" > "$environment/.installed"
    fi
    echo "Python $version:"
    # shellcheck disable=SC2086
    "$environment/bin/python" -m pytest --quiet -p no:cacheprovider $tests
done
