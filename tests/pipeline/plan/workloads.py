"""A workload with round numbers: 10 core-seconds and 31.2 TFLOP a video, 10 MB of tokens."""

from pipeline.plan.estimate import Cluster, Prices
from pipeline.plan.intervals import Interval
from pipeline.plan.workload import Workload

A100S = Cluster(4, "A100", 48.0)
PRICED = Prices(gpu_hour=2.0)


def work(**changes) -> Workload:
    exactly = Interval.exactly
    given = {
        "videos": 1000,
        "failed": exactly(0.0),
        "decode_s": exactly(10.0),
        "flops": exactly(31.2e12),  # a tenth of a second of an A100's peak
        "parameters": 400_000_000,
        "patch_bytes": 1e8,
        "tokens": (exactly(6272.0), exactly(1568.0)),
        "frame_bytes": exactly(14e6),
        "output_bytes": exactly(1e7),
        "selection_s": exactly(0.3),
        "seconds": exactly(60.0),
    }
    return Workload(**{**given, **changes})
