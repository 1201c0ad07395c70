#!/usr/bin/env bash
# Runs TorchTitan's own unit tests on top of this fork's modules.
#
#   scripts/upstream_tests.sh CHECKOUT [PYTEST ARGUMENTS]
#
# CHECKOUT is a checkout of TorchTitan's tag v0.2.2 (its tests are in no package; nothing is fetched here):
#
#   git clone --depth 1 --branch v0.2.2 https://github.com/pytorch/torchtitan CHECKOUT
#
# Runs the tests of the parts that this fork replaces or stands on: dataloader, dataset checkpointing, job config, train
# spec, checkpoint, tokenizer. The tests come from the checkout, the tested code from this repository and the installed
# release, never from the checkout. Some of them need more than this fork does (tomli_w, expecttest), and some of
# the tokenizer's fetch from the Hugging Face Hub. The exit status is pytest's; 2 if the checkout will not do.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
tag=v0.2.2
modules=(dataloader dataset_checkpointing job_config train_spec checkpoint tokenizer)

fail() { echo "upstream_tests.sh: $*" >&2; exit 2; }
usage="usage: scripts/upstream_tests.sh CHECKOUT [PYTEST ARGUMENTS]
CHECKOUT is a folder with TorchTitan's tag $tag, for example from
  git clone --depth 1 --branch $tag https://github.com/pytorch/torchtitan CHECKOUT"

case ${1:-} in
    "") echo "$usage" >&2; exit 2 ;;
    -h | --help) echo "$usage"; exit ;;
esac
[ -d "$1" ] || fail "there is no folder $1
$usage"
checkout=$(cd "$1" && pwd -P)
shift

grep -q '^name = "torchtitan"' "$checkout/pyproject.toml" 2>/dev/null ||
    fail "$checkout is no checkout of TorchTitan: its pyproject.toml is missing or another project's"
version=$(tr -d '[:space:]' 2>/dev/null <"$checkout/assets/version.txt") ||
    fail "$checkout has no assets/version.txt, which names the release; expected $tag"
[ "v$version" = "$tag" ] || fail "$checkout is TorchTitan $version, and this fork stands on $tag: git checkout $tag"
[ -d "$checkout/tests/unit_tests" ] ||
    fail "$checkout has no tests/unit_tests: TorchTitan's packages leave them out; take a clone of its repository"

files=()
for module in "${modules[@]}"; do
    file=tests/unit_tests/test_$module.py
    if [ -f "$checkout/$file" ]; then
        files+=("$file")
    else
        echo "upstream_tests.sh: not in this checkout, left out: $file" >&2
    fi
done
[ ${#files[@]} -gt 0 ] || fail "$checkout/tests/unit_tests has none of the tests"

python=$("$repo/scripts/install.sh" dev)

# Both repositories have folders named tests and scripts, and the checkout has a torchtitan: so neither of the two goes
# onto the path, only this fork's packages by themselves. With import-mode=append the checkout comes last.
path=$(mktemp -d)
trap 'rm -rf "$path"' EXIT
ln -s "$repo/torchtitan" "$repo/zephon_patches" "$path/"
export PYTHONPATH=$path # nothing else: it may name this repository

cd "$checkout" # the tests open files of it by relative paths
"$python" - --import-mode=append -p no:cacheprovider "${files[@]}" "$@" <<'PYTHON'
import os
import sys

sys.path[:] = [entry for entry in sys.path if entry]  # "" is the working folder, the checkout

import pytest
import torchtitan
from torchtitan.config import JobConfig

expected = os.path.join(os.environ["PYTHONPATH"], "torchtitan", "__init__.py")
assert torchtitan.__spec__.origin == expected, torchtitan.__spec__
assert hasattr(JobConfig(), "data"), "the overlay is not active"
sys.exit(pytest.main(sys.argv[1:]))
PYTHON
