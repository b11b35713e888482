#!/usr/bin/env bash
# builds the wheel and proves, in fresh virtual environments, what only an installation can show: the import hook is in
# place in a wheel and in an editable install, a process that never imports hf_lowbit loads a checkpoint, and uninstalling
# leaves nothing behind
#
# usage: scripts/check_wheel.sh [python]
#
# torch and transformers are read from the environment of the given python, where hf_lowbit must be installed
# (`make setup`); its own .pth files are not, so the hook that is seen is the one just installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
python=$(command -v "${1:-python}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
base=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# a broken C file must fail here, not turn into a slower package; HF_LOWBIT_NO_C=1 builds without it on purpose
if [ "${HF_LOWBIT_NO_C:-0}" = 0 ]; then
    export HF_LOWBIT_REQUIRE_C=1
fi
"$python" -m build --outdir "$scratch/dist" . > "$scratch/build.log" 2>&1 || { cat "$scratch/build.log"; exit 1; }
wheel=$(echo "$scratch"/dist/*.whl)
echo "built $(basename "$wheel")"

"$python" - "$scratch/checkpoint" <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_lowbit as lb

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)).eval()
model = lb.quantize(model, lb.LowBitConfig(bits=4, group_size=16))
model.save_pretrained(sys.argv[1])
torch.save(model(torch.arange(8)[None]).logits.detach(), f"{sys.argv[1]}/logits.pt")
PY

# a program that knows transformers only
cat > "$scratch/load.py" <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM

folder, home = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
logits = model(torch.arange(8)[None]).logits.detach()
if not torch.equal(logits, torch.load(f"{folder}/logits.pt")):
    sys.exit("the logits differ from those of the model that was saved")
hf_lowbit = sys.modules["hf_lowbit"].__file__
if not hf_lowbit.startswith(home):
    sys.exit(f"hf_lowbit was read from {hf_lowbit}, expected it under {home}")
PY

check() { # kind, where hf_lowbit must come from, arguments of pip install
    local kind=$1 home=$2 venv="$scratch/$1"
    shift 2
    "$python" -m venv "$venv"
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$base" > "$site/zz_base.pth"
    "$venv/bin/python" -m pip install --quiet --no-deps "$@"

    cd "$scratch"
    "$venv/bin/python" load.py checkpoint "${home:-$site}"
    "$venv/bin/python" -I load.py checkpoint "${home:-$site}"
    if HF_LOWBIT_AUTOLOAD=0 "$venv/bin/python" load.py checkpoint "${home:-$site}" > off.log 2>&1; then
        echo "$kind: a checkpoint was loaded with the hook switched off" && exit 1
    fi
    grep -q "mismatch" off.log || { cat off.log; exit 1; }
    # an interpreter that starts without site-packages, and one that has nothing to do with transformers
    "$venv/bin/python" -S -c 'import sys; assert "_hf_lowbit_autoload" not in sys.modules'
    "$venv/bin/python" -W error -c 'import sys; assert not {"hf_lowbit", "transformers", "torch"} & set(sys.modules)'
    cd "$root"

    "$venv/bin/python" -m pip uninstall --quiet --yes hf_lowbit
    if ls "$site" | grep -i lowbit; then
        echo "$kind: uninstalling left files behind" && exit 1
    fi
    "$venv/bin/python" -c 'import sys; assert "_hf_lowbit_autoload" not in sys.modules'
    echo "$kind install: the hook loads a checkpoint, can be switched off, and is gone after uninstalling"
}

check wheel "" "$wheel"
check editable "$root/hf_lowbit" -e "$root"
