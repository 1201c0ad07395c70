"""Machines come and go under a real run: scripts/elastic_nodes.py on the demo data."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.make_demo_data import make_demo_data

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_machine_is_killed_one_joins_and_one_leaves_and_each_sample_is_trained_on_once(tmp_path):
    make_demo_data(REPOSITORY / "demo_data")
    result = subprocess.run(
        [sys.executable, "scripts/elastic_nodes.py", "--out", str(tmp_path / "out")],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "312 samples in 26 steps, each trained on once, in order, on all these ranks" in result.stdout
