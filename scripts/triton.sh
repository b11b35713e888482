#!/usr/bin/env bash
# runs the tests of the Triton kernels without a GPU: in Triton's interpreter, then compiled ahead for several devices
#
# usage: scripts/triton.sh [python] [arguments of pytest]
#
# Where the given python has no triton, .venv-triton gets it and nothing else (about 300 MB to fetch, 1 GB on disk);
# torch and everything else are read from the environment of that python, where hf_lowbit must be installed.
set -euo pipefail
# several processes share the cores
export OMP_NUM_THREADS=1
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${1:-python}
[ $# -gt 0 ] && shift

if ! "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('triton') is None)"; then
    venv=.venv-triton
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    # site-packages of the base environment come after those of .venv-triton, .pth files of editable installs included
    base=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf 'import site; site.addsitedir(%s)\n' "'$base'" > "$own/zz_base.pth"
    "$venv/bin/python" -c "import triton" 2> /dev/null || "$venv/bin/python" -m pip install --quiet --no-deps "triton>=3.4"
    python=$venv/bin/python
fi

TRITON_INTERPRET=1 "$python" -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests/kernels/triton "$@"
exec "$python" -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests/kernels/triton "$@"
