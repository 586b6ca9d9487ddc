#!/usr/bin/env bash
# Checks and tests a fresh clone: creates .venv if it is missing, then runs all checks and the CPU suite.
#   bash scripts/test.sh [options of pytest, such as -k advantages]
#   bash scripts/test.sh --all [options of pytest]
# CI gives --all: with the tests marked `engine` (vLLM, DeepSpeed, megatron-core) and `long`, and then those of SGLang.
# The exit code is that of the first step that fails: a check, pytest, or pytest with SGLang.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
chosen="not gpu and not sglang and not engine and not long"
if [[ ${1:-} == --all ]]; then
    shift
    chosen="not gpu and not sglang"
fi
bash scripts/setup_env.sh dev
bash scripts/check.sh
unset PYTHONDONTWRITEBYTECODE                # else every process that the tests start compiles lightrl anew
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests start several ranks on the same cores
# Two workers, since starting ranks is mostly waiting. Tests of a class or file stay on one worker to share fixtures.
.venv/bin/python -m pytest -m "$chosen" -n 2 --dist loadscope --no-loadscope-reorder "$@"
[[ $chosen == *engine* ]] || bash scripts/test_sglang.sh # has an environment of its own
