#!/bin/sh
# Runs the tests of the C kernels under the address and undefined-behaviour sanitizers.
#
#     scripts/sanitize_kernels.sh [python] [arguments of pytest]
#
# The library is compiled for this run alone and never installed. Python itself is not instrumented, so the address
# sanitizer is loaded before it, and leaks are not looked for: the interpreter keeps memory until its end.
set -eu

python=${1:-python3}
[ $# -gt 0 ] && shift
root=$(cd "$(dirname "$0")/.." && pwd)
cc=${CC:-cc}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# -O1: faster to compile, and the checks are not optimized away
"$cc" -O1 -g -std=c11 -fPIC -shared -pthread -fopenmp -fno-omit-frame-pointer \
    -fsanitize=address,undefined -fno-sanitize-recover=all \
    "$root"/hf_lowbit/csrc/*.c -o "$folder/_lowbit_cpu.so" -lm

cd "$root"
env HF_LOWBIT_LIBRARY="$folder/_lowbit_cpu.so" \
    LD_PRELOAD="$($cc -print-file-name=libasan.so) $($cc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    "$python" -m pytest -q -s -p no:cacheprovider tests/kernels/test_cpu_linear.py tests/kernels/test_cpu_input.py \
    tests/kernels/test_cpu_threads.py tests/kernels/test_cpu_amx.py tests/kernels/test_cpu_digits.py \
    tests/kernels/test_cpu_rows.py tests/kernels/test_cpu_experts.py tests/kernels/test_cpu_several.py "$@"
