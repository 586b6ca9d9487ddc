#!/usr/bin/env bash
# Tests --engine sglang with the real SGLang, on a GPU or without: makes .venv-sglang if need be (11 GB, since SGLang
# pins a torch of its own), then runs its tests and no others.
#   bash scripts/test_sglang.sh [options of pytest]
# The exit code is that of pytest. Where SGLang cannot be installed, it says so and ends with 0.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=0.5.23
venv=.venv-sglang
python=$venv/bin/python
stamp=$venv/lightrl-installed

say() { printf '[sglang] %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.10 python3; do # what SGLang has wheels for
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' >/dev/null 2>&1; then
            printf '%s' "$candidate"
            return
        fi
    done
    return 1
}

install() {
    local base
    if ! [[ -x $python ]]; then
        base=$(find_python) || return 1
        "$base" -m venv "$venv" || return 1
    fi
    "$python" -m pip install --quiet "sglang==$version" "pytest>=8.0" "pytest-timeout>=2.3" || return 1
    "$python" -m pip install --quiet --editable . || return 1
    "$python" -m pip install --quiet --no-deps --force-reinstall ./tests/sglang_cpu || return 1
}

fingerprint() {
    cat scripts/test_sglang.sh pyproject.toml tests/sglang_cpu/*.py tests/sglang_cpu/*.toml | sha256sum
    pwd
}

wanted=$(fingerprint)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    say "$venv is up to date"
else
    say "installing sglang $version into $venv (11 GB, some minutes)"
    if ! install; then
        say "NOT TESTED: sglang $version could not be installed here; pip's message stands above."
        exit 0
    fi
    "$python" -c 'import importlib.metadata as m, sys; sys.exit(m.version("sglang") != sys.argv[1])' "$version"
    printf '%s\n' "$wanted" >"$stamp"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two spinning threads a core cost a factor of ten
exec "$python" -m pytest -m sglang tests/engines/real_sglang "$@"
