"""The format's page: its example prints what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_worked_example_of_the_page_prints_what_it_says(tmp_path):
    page = (REPOSITORY / "docs" / "store.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    expected = re.search(r"```text\n(.*?)```", page, re.DOTALL).group(1)
    (tmp_path / "example.py").write_text(code)
    ended = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    # Another value here means that stores which were built before are built again, or cannot be read.
    assert [line.rstrip() for line in ended.stdout.splitlines()] == expected.splitlines()
