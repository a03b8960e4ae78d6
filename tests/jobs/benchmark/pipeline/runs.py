"""Runs of child processes as the benchmark of the whole job gets them, made up."""

from jobs.benchmark.pipeline.measure import Cell, Run, medians, slope
from jobs.benchmark.pipeline.work import Answer


def run(videos, seconds, store_bytes=0, store_objects=0, peak_bytes=10**8, **cpu_s):
    return Run(videos, Answer(seconds, store_bytes, store_objects), cpu_s, peak_bytes)


def rates(videos_per_s, **cpu_s):
    """Of two runs that differ by a hundred videos, and by so many CPU seconds."""
    few = run(10, 5.0, 1000, 4, main=1.0)
    return slope(few, run(110, 5.0 + 100 / videos_per_s, 1000 + 10**8, 104, main=2.0, **cpu_s))


def cell(nodes=0, encoders=1, work_s=0.05, **videos_per_s):
    return Cell(2, work_s, 1, encoders, nodes, {kind: medians([rates(speed)]) for kind, speed in videos_per_s.items()})
