#!/usr/bin/env bash
# Trains: ./run_train.sh [TRAINER ARGUMENTS], for example ./run_train.sh --training.steps 40
#
# Needs Python 3.10 or newer; installs the rest into ./.venv at the first start, unless the active environment
# has it. Works from any folder. --help shows the trainer's settings.
#
#   NGPU         processes on this machine       default: the number of GPUs, or 2 CPU processes without any
#   CONFIG_FILE  training config                 default: train_configs/llama3_debug.toml
#   LOG_RANK     ranks whose output is shown     default: 0; several as 0,1
#   TRAIN_FILE   module of the trainer           default: torchtitan.train
#   COMM_MODE    fake_backend or local_tensor: one process plays NGPU ranks for one step, to try a config
#   PYTHON       Python to install with          default: python3
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT               default: 30
#                seconds from a SIGTERM to the ranks' SIGKILL; a step and a checkpoint have to fit (docs/preemption.md)
#
# A SIGTERM goes on to all ranks, and the status is 0 if all of them end with 0, as with data.on_preempt = "checkpoint".
#
# Relative paths inside a config of this repository, and in the arguments given with it, start at the repository;
# with any other config they start at the current folder.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
fail() { echo "run_train.sh: $*" >&2; exit 1; }

config=${CONFIG_FILE:-$repo/train_configs/llama3_debug.toml}
if [ ! -f "$config" ]; then
    [ -f "$repo/$config" ] || fail "CONFIG_FILE $config is neither in $PWD nor in $repo"
    config=$repo/$config
fi
config=$(cd "$(dirname "$config")" && pwd -P)/$(basename "$config")

num_gpus=$("$repo/scripts/num_gpus.sh")
if [ -z "${NGPU:-}" ]; then
    NGPU=$((num_gpus > 0 ? num_gpus : 2))
fi
case $NGPU in
    *[!0-9]* | 0*) fail "NGPU is '$NGPU': expected a number of processes, at least 1" ;;
esac
export NGPU
export LOG_RANK=${LOG_RANK:-0}
train_file=${TRAIN_FILE:-torchtitan.train}

python=$("$repo/scripts/install.sh")

# The repository first, so that its torchtitan/ wins over the installed one.
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}

for argument in "$@"; do
    if [ "$argument" = --help ] || [ "$argument" = -h ]; then
        case $config in "$repo"/*) cd "$repo" ;; esac
        exec "$python" -m "$train_file" --job.config_file "$config" --help
    fi
done

case $config in
    "$repo"/*)
        cd "$repo"
        if grep -q 'demo_data/' "$config"; then
            "$python" scripts/make_demo_data.py
        fi
        ;;
esac

if [ "$num_gpus" -gt 0 ]; then
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
elif [ -z "${OMP_NUM_THREADS:-}" ]; then
    # Each process takes its share of the cores; all of them in every process is many times slower.
    num_cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)')
    export OMP_NUM_THREADS=$((num_cores > NGPU ? num_cores / NGPU : 1))
fi

if [ -n "${COMM_MODE:-}" ]; then
    export LOCAL_RANK=0
    exec "$python" -m "$train_file" --job.config_file "$config" "$@" "--comm.mode=$COMM_MODE" --training.steps 1
fi

# It is torchrun, and ends with status 0 after a SIGTERM if its ranks did. Its process is this script's: signals reach it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-30}
exec "$python" -m zephon_patches.launch \
    --nproc_per_node "$NGPU" --rdzv_backend c10d --rdzv_endpoint localhost:0 \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
    -m "$train_file" --job.config_file "$config" "$@"
