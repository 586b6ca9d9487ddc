#!/usr/bin/env bash
# Runs the GPU suite and the GPU benchmarks, and writes docs/gpu_results.md with date, versions and numbers.
# Ends with 3 on a machine without a CUDA device, and with 1 if a test or a benchmark failed; the page is then written too.
#
#     bash scripts/gpu_report.sh [PAGE]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
if [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
fi
page=${1:-docs/gpu_results.md}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_report.sh: torch sees no CUDA device on this machine, so nothing was run and $page was not written." >&2
    exit 3
fi

failed=0
part() { # TITLE COMMAND...: runs a command and appends what it printed
    local title=$1 rc=0
    shift
    echo "== $title: $*" >&2
    output=$("$@" 2>&1) || rc=$?
    if ((rc != 0)); then
        failed=1
    fi
    {
        printf '\n## %s\n\n`%s` ended with %d.\n\n```\n' "$title" "$*" "$rc"
        tail -n 40 <<<"$output"
        printf '```\n'
    } >>"$page"
}

{
    echo "# Results on GPUs"
    echo
    echo "Written by \`scripts/gpu_report.sh\` on $(date -u +%F), commit $(git rev-parse --short HEAD)."
    echo
    "$python" -c '
import sys, torch, transformers
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}; ", end="")
print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}.")'
} >"$page"
part "Tests" "$python" -m pytest -q -m gpu
part "Weight sync" "$python" benchmarks/sync.py --models mid large --dtypes bfloat16
part "Training, decoding and sleep" "$python" benchmarks/gpu.py --models 0.6b 4b --lengths 16384 65536
echo "wrote $page" >&2
exit $failed
