#!/usr/bin/env bash
# The first command on a fresh machine: install, fetch a real model, compress it to 4 bits, and show what that changed.
# Uses the active virtual environment, or makes .venv. Arguments go to examples/compress_smollm2.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

make setup
python="${VIRTUAL_ENV:-.venv}/bin/python"
"$python" scripts/fetch_assets.py smollm2
"$python" examples/compress_smollm2.py "$@"
