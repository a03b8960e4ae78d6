"""Measurements set the numbers of threads of their process, which here is that of other tests too."""

import json

import pyarrow as pa
import pytest
import torch

from jobs.benchmark import __main__ as benchmark


@pytest.fixture(autouse=True)
def threads():
    numbers = torch.get_num_threads(), pa.cpu_count()
    yield
    torch.set_num_threads(numbers[0])
    pa.set_cpu_count(numbers[1])


@pytest.fixture
def measure(capsys):
    """Run a benchmark; return its document, and what it shows beside that in a line."""

    def run(*argv):
        assert benchmark.main([*map(str, argv), "--json"]) == 0
        said = capsys.readouterr()
        return json.loads(said.out), said.err.replace("\n", " ")

    return run
