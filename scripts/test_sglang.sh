#!/usr/bin/env bash
# Tests --engine sglang with the real SGLang, with or without a GPU. Creates .venv-sglang if it is missing (11 GB, since
# SGLang pins its own version of torch), then runs only these tests.
#   bash scripts/test_sglang.sh [options of pytest]
# The exit code is pytest's. If SGLang cannot be installed, the script says so and exits with 0.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=0.5.23
venv=.venv-sglang
python=$venv/bin/python
stamp=$venv/lightrl-installed

say() { printf '[sglang] %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.10 python3; do # SGLang has wheels for these
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
    "$python" -m pip install --quiet --editable ".[lora,megatron]" || return 1
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
    say "installing sglang $version into $venv (11 GB, a few minutes)"
    if ! install; then
        say "NOT TESTED: sglang $version could not be installed; see pip's message above."
        exit 0
    fi
    "$python" -c 'import importlib.metadata as m, sys; sys.exit(m.version("sglang") != sys.argv[1])' "$version"
    printf '%s\n' "$wanted" >"$stamp"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two busy-waiting threads per core are ten times slower
exec "$python" -m pytest -m sglang tests/engines/real_sglang "$@"
