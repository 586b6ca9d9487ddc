#!/usr/bin/env bash
# From a fresh clone to a verdict: makes .venv if need be, then checks, then the whole CPU suite.
#   bash scripts/test.sh [options of pytest, such as -k advantages]
# The exit code is that of the first check that fails, else pytest's.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh dev
bash scripts/check.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests start several ranks that share the cores
# Two at a time, as most of a start of ranks is waiting; a class or file stays together for what its tests share.
exec .venv/bin/python -m pytest -m "not gpu and not sglang" -n 2 --dist loadscope --no-loadscope-reorder "$@"
