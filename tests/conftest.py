"""Settings of all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported, and for the processes that tests start, too. What tests compute is small: with a thread for
# each core in each of several processes, they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Time is not tested, and a fixture's store may serve all examples of a property.
settings.register_profile(
    "default",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("default")


@pytest.fixture
def small_blocks(monkeypatch):
    """Numbers are located in short blocks, so that short runs cross many of them and start fast."""
    monkeypatch.setattr("zephon_patches.loader.plan._BLOCK_ROWS", 20)
    monkeypatch.setattr("zephon_patches.loader.plan._MADE_ROWS", 7)
