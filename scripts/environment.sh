# Sourced by quickstart.sh and test.sh: makes .venv, installs the given requirements once, and activates it.
# Prefers python3.11, the version the pins were made for.
requirements="${1:?give the requirements file}"
if [ ! -x .venv/bin/python ]; then
    python="$(command -v python3.11 || command -v python3 || true)"
    if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        echo "error: Python 3.11 is needed; found ${python:-no python3}; install it (for example: apt install python3.11-venv)" >&2
        exit 2
    fi
    "$python" -m venv .venv
fi
# shellcheck disable=SC1091
source .venv/bin/activate
stamp=".venv/.installed-$requirements"
wanted="$(cat requirements*.txt | sha256sum)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing $requirements into .venv (once; a few minutes the first time)"
    python -m pip install --quiet --disable-pip-version-check -r "$requirements"
    echo "$wanted" > "$stamp"
fi
