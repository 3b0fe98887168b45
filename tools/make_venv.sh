#!/usr/bin/env bash
# Make .venv with the given Python unless there is a working one.
set -euo pipefail
python=${1:-python3}

if [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    exit 0
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Octavo needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Try: make PYTHON=python3.11" >&2
    exit 1
fi
rm -rf .venv
# Debian keeps ensurepip, without which a virtual environment has no pip, in a package of its own.
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing python3-venv (this Python has no ensurepip)"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    else
        echo "$python cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv" >&2
        exit 1
    fi
fi
"$python" -m venv .venv
