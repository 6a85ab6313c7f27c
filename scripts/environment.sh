# Sourced by quickstart.sh, test.sh and check_gpu.sh: creates .venv, installs the given requirements once, and activates it.
requirements="${1:?give the requirements file}"
if [ ! -x .venv/bin/python ]; then
    python=""
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            python="$candidate"
            break
        fi
    done
    if [ -z "$python" ]; then
        found="$(python3 --version 2>/dev/null || echo "no python3")"
        echo "error: found $found; Python 3.11, 3.12 or 3.13 is needed; install one (for example: apt install python3.11-venv)" >&2
        exit 2
    fi
    "$python" -m venv .venv
fi
# shellcheck disable=SC1091
source .venv/bin/activate
stamp=".venv/.installed-$requirements"
wanted="$(cat requirements*.txt | sha256sum)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing $requirements into .venv (once; takes a few minutes)"
    python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    echo "$wanted" > "$stamp"
fi
