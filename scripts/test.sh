#!/usr/bin/env bash
# Checks everything: style, types, tests. Installs what that needs into ./.venv at the first start.
#
#   scripts/test.sh                       everything; later checks run although an earlier one fails
#   scripts/test.sh tests/order -k seed   arguments go to pytest, and only pytest runs
#   scripts/test.sh -m slow -s            tests that take minutes each, which are left out otherwise
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$("$repo/scripts/install.sh" dev)
cd "$repo"
# The repository first, so that its torchtitan/ wins over the installed one.
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}

if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi

failed=()
check() {
    local name=$1
    shift
    echo "== $name"
    "$python" -m "$@" || failed+=("$name")
}
check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "pytest" pytest
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
