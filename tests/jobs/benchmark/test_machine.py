"""What a benchmark says of the machine that it ran on."""

import torch

from jobs.benchmark.machine import machine, machine_line


def test_the_line_says_what_the_record_says():
    where, line = machine("cpu"), machine_line("cpu")
    assert where["processor"] and where["threads"] == torch.get_num_threads() and where["torch"] == torch.__version__
    assert line.startswith(where["processor"]) and line.endswith(f"torch {torch.__version__.partition('+')[0]}")
    assert f", {where['threads']} thread" in line and ("threads" in line) == (where["threads"] > 1)
