#!/usr/bin/env bash
# Shows that the number of ranks does not change the training: trains 12 steps on 2 ranks in one go; then, from the
# beginning, 4 steps on 2 ranks, 4 on 3 and 4 on 1, each from the checkpoint of the one before. Prints the samples and
# the loss of each step of both side by side, draws the losses, and fails if a step has other samples or if its losses
# differ by more than a relative 1e-4. Takes two to three minutes on 2 CPU cores.
#
#   scripts/elastic_demo.sh [TRAINER ARGUMENTS]      for example --training.local_batch_size 3
#
# CONFIG_FILE and the other variables of run_train.sh are passed on; a config has to fix training.global_batch_size and
# lr_scheduler.total_steps. Everything goes into outputs/elastic_demo, which is made anew. With fewer than 3 GPUs
# it runs on the CPU.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
out=$repo/outputs/elastic_demo
python=$("$repo/scripts/install.sh" plot)

num_gpus=$("$repo/scripts/num_gpus.sh")
if [ "$num_gpus" -lt 3 ]; then
    [ "$num_gpus" = 0 ] || echo "elastic_demo.sh: 3 ranks need 3 GPUs, and there are $num_gpus: training on the CPU" >&2
    export CUDA_VISIBLE_DEVICES=
fi

rm -rf "$out"
mkdir -p "$out"

# train NAME NGPU LAST_STEP [ARGUMENTS]
train() {
    local name=$1 ngpu=$2 steps=$3 started=$SECONDS
    shift 3
    echo "$name run: up to step $steps on $ngpu ranks"
    NGPU=$ngpu TRAIN_FILE=scripts.recording_train RECORD_FOLDER=$out/$name/record \
        "$repo/run_train.sh" "$@" --job.dump_folder "$out/$name" --training.steps "$steps" \
        --checkpoint.enable --checkpoint.no_last_save_model_only --metrics.log_freq 1 >>"$out/$name.log" 2>&1 || {
        tail -n 30 "$out/$name.log" >&2
        echo "elastic_demo.sh: this run failed; its whole log is $out/$name.log" >&2
        exit 1
    }
    echo "    $((SECONDS - started)) s"
}

train uninterrupted 2 12 "$@"
train elastic 2 4 "$@"
train elastic 3 8 "$@"
train elastic 1 12 "$@"

"$python" "$repo/scripts/elastic_demo.py" "$out/uninterrupted/record" "$out/elastic/record" --plot "$out/losses.png"
