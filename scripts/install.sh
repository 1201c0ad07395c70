#!/usr/bin/env bash
# Prints the path of a Python that has this package; installs the package first where none has it.
#
#   scripts/install.sh          what training needs
#   scripts/install.sh dev      and what the tests need
#   scripts/install.sh plot     and what scripts/elastic_demo.sh draws with
#
# An environment that has the package already (python3 on PATH) is used as it is. Otherwise ./.venv is made and the
# versions of constraints.txt are installed into it, once: a stamp that is written last, with a checksum of
# pyproject.toml and constraints.txt, tells a whole installation from one that was interrupted or is out of date.
# All messages go to standard error. PYTHON=... names another Python than python3.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
extra=${1:-}
base_python=${PYTHON:-python3}
venv=$repo/.venv
stamp=$venv/installed

say() { echo "torchtitan-zephon: $*" >&2; }
fail() { say "$@"; exit 1; }

case $extra in
    "") tools=() ;;
    dev) tools=(hatchling hypothesis mypy pytest pytest-timeout pytest-xdist ruff) ;;
    plot) tools=(matplotlib) ;;
    *) fail "unknown extra '$extra': expected 'dev', 'plot' or nothing" ;;
esac

# has PYTHON DISTRIBUTION...: prints the Python's own path if it has all of them. Asked from / and without PYTHONPATH,
# since in the repository's folder any Python finds the package's source, installed or not.
has() {
    local python=$1
    shift
    (cd / && env -u PYTHONPATH "$python" - "$@" 2>/dev/null) <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, distribution

try:
    for name in sys.argv[1:]:
        distribution(name)
except PackageNotFoundError:
    sys.exit(1)
print(sys.executable)
PYTHON
}

# 1. The environment that is active. (The odd ${a[@]+...}: to bash before 4.4 an empty array is an unset one.)
if command -v "$base_python" >/dev/null; then
    if python=$(has "$base_python" torchtitan-zephon ${tools[@]+"${tools[@]}"}); then
        echo "$python"
        exit
    fi
fi

# 2. ./.venv, if it is whole. The stamp is the checksum and, behind it, the extras that are installed: "dev,plot".
checksum=$(cat "$repo/pyproject.toml" "$repo/constraints.txt" | cksum)
is_whole() {
    [ -f "$stamp" ] && [ -x "$venv/bin/python" ] || return 1
    local content
    content=$(cat "$stamp")
    case $content in "$checksum "*) ;; *) return 1 ;; esac
    [ -z "$extra" ] || has_extra "$extra"
}
has_extra() {
    [ -f "$stamp" ] || return 1
    local content
    content=$(cat "$stamp")
    case ,${content##* }, in *,"$1",*) ;; *) return 1 ;; esac
}
if is_whole; then
    echo "$venv/bin/python"
    exit
fi

# 3. Install, one process at a time. The lock ends with this script, however it ends.
if command -v flock >/dev/null; then
    exec 9>"$repo/.venv.lock"
    if ! flock -n 9; then
        say "another process installs into $venv; waiting for it"
        flock 9
        if is_whole; then
            echo "$venv/bin/python"
            exit
        fi
    fi
fi

command -v "$base_python" >/dev/null ||
    fail "$base_python is not found: install Python 3.10 or newer, or name one with PYTHON=/path/to/python3"
version=$("$base_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "$base_python does not run: install Python 3.10 or newer, or name one with PYTHON=/path/to/python3"
case $version in
    [0-2].* | 3.[0-9]) fail "$base_python is Python $version, and 3.10 or newer is needed: name one with PYTHON=/path/to/python3" ;;
esac

# An environment keeps the extras that it has.
extras=
for name in dev plot; do
    if [ "$name" = "$extra" ] || has_extra "$name"; then
        extras=$extras${extras:+,}$name
    fi
done
say "installing into $venv with Python $version (once; downloads PyTorch, which takes minutes)"
rm -f "$stamp"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    # --clear: what a killed start left may be half a virtual environment.
    "$base_python" -m venv --clear "$venv" >&2 ||
        fail "$base_python cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)"
fi
# pip's own report is for people who watch; a log gets its errors alone.
quiet=()
[ -t 2 ] || quiet=(--quiet)
(cd / && env -u PYTHONPATH "$venv/bin/python" -m pip install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"} \
    -c "$repo/constraints.txt" -e "$repo${extras:+[$extras]}") >&2 ||
    fail "the installation failed; the next start tries again"
echo "$checksum $extras" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "installed"
echo "$venv/bin/python"
