#!/usr/bin/env bash
# Checks and tests a fresh clone: creates .venv if it is missing, then runs all checks and the whole CPU suite.
#   bash scripts/test.sh [options of pytest, such as -k advantages]
# The exit code is that of the first check that fails, or pytest's if all checks pass.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh dev
bash scripts/check.sh
unset PYTHONDONTWRITEBYTECODE                # else every process that the tests start compiles lightrl anew
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests start several ranks on the same cores
# Two workers, since starting ranks is mostly waiting. Tests of a class or file stay on one worker to share fixtures.
exec .venv/bin/python -m pytest -m "not gpu and not sglang" -n 2 --dist loadscope --no-loadscope-reorder "$@"
