#!/usr/bin/env bash
# Trains a small model by GRPO on two ranks, from a fresh clone: creates .venv first if it is missing.
#   bash scripts/quickstart.sh [options of scripts/train_grpo.py, such as --max_steps 50]
# Each run gets a new folder under runs/ unless --output_dir names one.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh

option() { # prints the value of an option among the arguments, in any spelling that the trainer accepts
    local name=$1 value=""
    shift
    while (($#)); do
        case $1 in
            --"$name" | --"${name//_/-}") value=${2:-} ;;
            --"$name"=* | --"${name//_/-}"=*) value=${1#*=} ;;
        esac
        shift
    done
    printf '%s' "$value"
}

num_gpus=0
if command -v nvidia-smi >/dev/null; then
    num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
fi
if ((num_gpus)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then # the run sees only these
    num_gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
fi
num_ranks=2
if ((num_gpus == 1)); then
    num_ranks=1 # each rank needs its own GPU
elif ((num_gpus == 0)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # otherwise each rank starts a thread for every core
fi

output_dir=$(option output_dir "$@")
if [[ -z $output_dir ]]; then
    output_dir=runs/quickstart-$(date +%Y%m%d-%H%M%S)
    set -- --output_dir "$output_dir" "$@"
fi

printf '[quickstart] GRPO on %s ranks; run folder: %s\n' "$num_ranks" "$output_dir"
status=0
.venv/bin/python -m torch.distributed.run --standalone --nproc_per_node "$num_ranks" \
    scripts/train_grpo.py --strategy fsdp "$@" || status=$?
if ((status)); then
    printf '[quickstart] the run failed with exit code %s; see its messages above\n' "$status" >&2
elif [[ -d $output_dir ]]; then
    printf '[quickstart] done: metrics, samples, checkpoints and the trained model are in %s\n' "$(cd "$output_dir" && pwd)"
    printf '[quickstart] curves: .venv/bin/tensorboard --logdir %s\n' "$output_dir"
fi
exit "$status"
