#!/usr/bin/env bash
# Starts the ranks of this node in a run over several nodes. Run the same command on every node:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash scripts/launch_node.sh --strategy fsdp
# with NODE_RANK 0, 1, ... and the address of node 0. Under Slurm, the script derives these four from srun's variables:
#   srun --nodes 2 --ntasks-per-node 1 bash scripts/launch_node.sh --strategy fsdp
# Arguments: a script and its options, or only options, which then go to scripts/train_grpo.py; or --check and options of
# `lightrl doctor`, which checks all nodes together before a run.
# NPROC_PER_NODE is the number of ranks on this node. Default: one per GPU, or one on a node without a GPU.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
    printf '[launch] error: %s\n' "$*" >&2
    exit 2
}

first_slurm_host() { # of this step: srun may run several on parts of a job's nodes
    local hosts nodes=${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}
    command -v scontrol >/dev/null || fail "SLURM_JOB_NODELIST is set but scontrol is not on PATH. Set MASTER_ADDR."
    hosts=$(scontrol show hostnames "$nodes") || fail "scontrol cannot read '$nodes'."
    printf '%s' "${hosts%%$'\n'*}"
}

read_slurm() { # a variable that is already set takes precedence
    NNODES=${NNODES:-${SLURM_NNODES:-}}
    NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
    if [[ -z ${MASTER_ADDR:-} && -n ${SLURM_JOB_NODELIST:-} ]]; then
        MASTER_ADDR=$(first_slurm_host)
    fi
    if [[ -z ${MASTER_PORT:-} && -n ${SLURM_JOB_ID:-} ]]; then
        # Equal on all nodes of a step, different for jobs and for steps that share a host.
        MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1009 * ${SLURM_STEP_ID:-0}) % 10000))
    fi
}

check_variables() {
    local name missing=()
    for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do
        [[ -n ${!name:-} ]] || missing+=("$name")
    done
    if ((${#missing[@]})); then
        fail "not set: ${missing[*]}. Example for the first of two nodes:
  NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 bash scripts/launch_node.sh --strategy fsdp"
    fi
    for name in NNODES NODE_RANK MASTER_PORT NPROC_PER_NODE; do
        [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name is '${!name}': it must be a whole number."
    done
    ((10#$MASTER_PORT > 0 && 10#$MASTER_PORT < 65536)) ||
        fail "MASTER_PORT is $MASTER_PORT: it must be a port from 1 to 65535, the same on all nodes."
    ((10#$NODE_RANK < 10#$NNODES)) || fail "NODE_RANK is $NODE_RANK: with NNODES $NNODES it must be 0 to $((10#$NNODES - 1))."
}

count_gpus() {
    local count=0
    if [[ ${CUDA_VISIBLE_DEVICES-unset} == "" ]]; then
        count=0
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
            count=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
        else
            count=$(nvidia-smi -L | grep -c '^GPU' || true)
        fi
    fi
    printf '%d' "$count"
}

find_torchrun() { # looks in an activated environment, then in the repository's own, then on PATH
    local candidate
    for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/torchrun}" "$root/.venv/bin/torchrun"; do
        if [[ -n $candidate && -x $candidate ]]; then
            printf '%s' "$candidate"
            return
        fi
    done
    command -v torchrun || fail "torchrun was not found. Run 'bash scripts/setup_env.sh' in the repository first."
}

read_slurm
num_gpus=$(count_gpus)
NPROC_PER_NODE=${NPROC_PER_NODE:-$((num_gpus > 0 ? num_gpus : 1))}
check_variables
if ((num_gpus == 0)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # otherwise each rank starts a thread for every core
fi
if [[ ${1:-} == --check ]]; then
    set -- -m lightrl.doctor "${@:2}"
elif (($# == 0)) || [[ $1 == --* ]]; then
    set -- "$root/scripts/train_grpo.py" "$@"
fi
# Otherwise torchrun kills the ranks 30 s after SIGTERM, while they still have --checkpoint.grace_s (300 s) to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-330}
torchrun=$(find_torchrun)
printf '[launch] node %s of %s at %s:%s, %s rank(s) here\n' \
    "$NODE_RANK" "$NNODES" "$MASTER_ADDR" "$MASTER_PORT" "$NPROC_PER_NODE"
exec "$torchrun" --nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" \
    --master_port "$MASTER_PORT" --nproc_per_node "$NPROC_PER_NODE" "$@"
