#!/usr/bin/env bash
# Checks everything: style, types, tests. Installs what that needs into ./.venv at the first start.
#
#   scripts/test.sh                       everything; later checks run although an earlier one fails
#   scripts/test.sh tests/order -k seed   arguments go to pytest, and only pytest runs, in one process
#   scripts/test.sh -m slow -s            tests that take minutes each, which are left out otherwise
#
# Without arguments the tests run in several processes, a file of tests in one of them: as many as there are cores, up to
# 4, since many tests start processes themselves. PYTEST_XDIST_AUTO_NUM_WORKERS=1 is another number.
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
# By the order of the names, which has long files early, and short ones last.
check "pytest" pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
