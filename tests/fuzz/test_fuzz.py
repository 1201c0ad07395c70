"""The fuzzer still runs; finding something takes minutes and its own command."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("target", ["manifest_values", "plans", "settings", "state_values", "store_files"])
def test_a_target_runs_without_a_fault(tmp_path, target):
    pytest.importorskip("atheris", reason="atheris is no dependency; see tests/fuzz/fuzz.py")
    command = [sys.executable, "-m", "tests.fuzz.fuzz", target, "-runs=200", f"-artifact_prefix={tmp_path}/"]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
