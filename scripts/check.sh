#!/usr/bin/env bash
# Runs formatter, linter, type checker and layer checker over the repository and stops at the first failure.
# It changes nothing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -d .venv/bin ]]; then
    PATH=$PWD/.venv/bin:$PATH
fi
set -x
ruff check .
ruff format --check .
mypy
lint-imports
