"""How a run of the tests uses the machine: threads, and the order of the files."""

from __future__ import annotations

import os
from collections import Counter

import pytest

# Before torch loads. Threads of several processes that share the cores wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests come first: the workers of ``-n`` then end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
