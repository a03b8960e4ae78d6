"""The benchmarks: one per file, each a record of where its questions and videos are and how they are asked."""

from __future__ import annotations

from collections.abc import Mapping

from gstep.lazy import LazyTable, format_suggestion
from pipeline.errors import UsageError
from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.benchmarks.lmms import PREFIX, make_lmms_benchmark
from pipeline.evaluate.benchmarks.own import make_user_benchmark
from pipeline.inputs.listings import find_suffix
from pipeline.inputs.tables import TABLE_SUFFIXES

#: Name -> benchmark; a new one needs a file and a line here. Each set of questions is a benchmark of its own, and
#: results of different benchmarks are never stored together.
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
    """Return the benchmark of this name, the task of lmms-eval (``lmms:TASK``), or the user's own questions in a file.

    A name with the suffix of a table (.jsonl, .csv, .parquet) is a file of questions. Neither the file nor the task is
    read yet.

    Raises:
        UsageError: the name is none of these.
    """
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    if name.startswith(PREFIX):
        return make_lmms_benchmark(name)
    if find_suffix(name) in TABLE_SUFFIXES:
        return make_user_benchmark(name)
    raise UsageError(
        f"--benchmark {name}: unknown{format_suggestion(name, BENCHMARKS)}; "
        f"known are {', '.join(BENCHMARKS)}, {PREFIX}TASK for a task of lmms-eval ({PREFIX}list lists them), and a "
        f"file of your own questions named {', '.join(sorted(TABLE_SUFFIXES))}"
    )
