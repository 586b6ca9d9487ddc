#!/usr/bin/env bash
# Formatter, linter, types and layers, over everything; changes nothing. Ends with the first that fails.
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
