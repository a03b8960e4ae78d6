"""Measurements set the numbers of threads of their process, which here is that of other tests too."""

import pyarrow as pa
import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    numbers = torch.get_num_threads(), pa.cpu_count()
    yield
    torch.set_num_threads(numbers[0])
    pa.set_cpu_count(numbers[1])
