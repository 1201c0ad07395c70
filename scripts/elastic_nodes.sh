#!/usr/bin/env bash
# Trains on machines that come and go, played by torchruns on this computer's CPU: one is killed, one joins, one is told
# to leave, and the run goes on by itself. Shows what happened and proves from traces that each sample was trained on
# once. Takes some minutes on 2 CPU cores. scripts/elastic_nodes.py says more.
#
#   scripts/elastic_nodes.sh [--config CONFIG] [--out FOLDER]
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$("$repo/scripts/install.sh")
"$python" "$repo/scripts/make_demo_data.py"
PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$repo/scripts/elastic_nodes.py" "$@"
