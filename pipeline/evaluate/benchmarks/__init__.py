"""The benchmarks: one a file, each a record that says where its questions and videos are and how they are asked."""

from __future__ import annotations

from collections.abc import Mapping

from gstep.lazy import LazyTable, did_you_mean
from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.benchmarks.lmms import PREFIX, lmms_benchmark
from pipeline.evaluate.benchmarks.own import own_benchmark
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.tables import TABLE_SUFFIXES

#: Name -> benchmark; a new one is a file and a line. Sets of other questions are other benchmarks, and their
#: results never share a place.
BENCHMARKS: Mapping[str, Benchmark] = LazyTable(
    "benchmark",
    {
        "videomme": "pipeline.evaluate.benchmarks.videomme:VIDEOMME",
        "longvideobench": "pipeline.evaluate.benchmarks.longvideobench:LONGVIDEOBENCH",
        "mlvu-dev": "pipeline.evaluate.benchmarks.mlvu:MLVU_DEV",
        "mlvu-test": "pipeline.evaluate.benchmarks.mlvu:MLVU_TEST",
        "mvbench": "pipeline.evaluate.benchmarks.mvbench:MVBENCH",
        "egoschema-subset": "pipeline.evaluate.benchmarks.egoschema:EGOSCHEMA_SUBSET",
        "egoschema": "pipeline.evaluate.benchmarks.egoschema:EGOSCHEMA",
        "shapes": "pipeline.evaluate.benchmarks.shapes:SHAPES",
    },
)


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark of this name, a task of lmms-eval, or the user's own questions in a file of this name.

    Nothing is read yet.

    Raises UsageError that lists the known names.
    """
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    if name.startswith(PREFIX):
        return lmms_benchmark(name)
    if find_suffix(name) in TABLE_SUFFIXES:
        return own_benchmark(name)
    raise UsageError(
        f"--benchmark {name}: unknown{did_you_mean(name, BENCHMARKS)}; "
        f"known are {', '.join(BENCHMARKS)}, {PREFIX}TASK for a task of lmms-eval ({PREFIX}list lists them), and a "
        f"file of your own questions named {', '.join(sorted(TABLE_SUFFIXES))}"
    )
