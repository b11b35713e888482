#!/usr/bin/env bash
# runs the quantizer tests on the oldest supported transformers
#
# usage: scripts/compat.sh [python] [transformers version]
#
# The environment it makes in .venv-compat holds only transformers and what that version wants differently; torch and
# everything else are read from the environment of the given python, where hf_lowbit must be installed (`make setup`).
set -euo pipefail
# several processes share the cores
export OMP_NUM_THREADS=1
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${1:-python}
version=${2:-5.16.1}
venv=.venv-compat

if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
# site-packages of the base environment come after those of .venv-compat, .pth files of editable installs included
base=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import site; site.addsitedir(%s)\n' "'$base'" > "$own/zz_base.pth"

"$venv/bin/python" -m pip install --quiet "transformers==$version"
"$venv/bin/python" - "$version" <<'PY'
import sys

import transformers

import hf_lowbit

wanted = sys.argv[1]
if transformers.__version__ != wanted:
    sys.exit(f"expected transformers {wanted}, got {transformers.__version__} from {transformers.__file__}")
print(f"hf_lowbit {hf_lowbit.__version__} on transformers {transformers.__version__}")
PY
exec "$venv/bin/python" -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests/quantizers tests/nn
