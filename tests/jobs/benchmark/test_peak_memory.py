"""The peak memory of a piece of work, in a child process."""

import os
import sys

import pytest

from jobs.benchmark.peak_memory import peak_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a safe fork")


def test_what_is_allocated_and_freed_again_counts():
    grown = peak_memory(lambda: len(b"\1" * 64_000_000))
    assert grown is not None and 60 < grown < 130
    nothing = peak_memory(lambda: None)
    assert nothing is not None and nothing < 20


def test_a_child_that_dies_has_no_figure():
    assert peak_memory(lambda: os._exit(9)) is None
