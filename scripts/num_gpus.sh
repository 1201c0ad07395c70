#!/usr/bin/env bash
# Prints the number of GPUs that a process started here may use; 0 without any.
set -euo pipefail

num_gpus=0
if command -v nvidia-smi >/dev/null; then
    num_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    case ${CUDA_VISIBLE_DEVICES-unset} in
        unset) ;;
        "" | -1) num_gpus=0 ;;
        *) num_gpus=$(echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c .) ;;
    esac
fi
echo "$num_gpus"
