"""Score pruning methods on a benchmark: each video is encoded once for all methods and ratios."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from jobs.command import EXIT_CODES, Parser, find_overridden_sampling, import_libraries, run_command
from jobs.frame.json_document import CommandResult
from pipeline.console import make_speaker
from pipeline.evaluate.config import LIST, EvaluateConfig

EPILOG = """\
examples:
  python -m jobs.evaluate --benchmark videomme --data Video-MME --model llava-hf/llava-onevision-qwen2-7b-ov-hf \\
      --method gstep vidcom2 fps --retention-ratio .10 .15 .20 .25 --out results
  python -m jobs.evaluate --benchmark questions.jsonl --data videos --method gstep fastv,K=3 random,seed=0..4
  python -m jobs.evaluate --benchmark lmms:vsibench --data $HF_HOME --out r/vsi
  python -m jobs.evaluate --score answers answers-10            score answers of jobs.generate
  python -m jobs.evaluate --results r/videomme r/mlvu r/mvbench --out table            one table of several benchmarks
  python -m jobs.evaluate --results r/videomme --reference vidcom2 --out pairs         differences to another method

Rerun the same command to resume. Methods and ratios that you add are answered beside the existing answers. --out gets
scores.parquet, tables.md, tables.tex, tables.json and report.html; --results says, too, where each method breaks.

"""

#: The options that --help shows.
USUAL = (
    *("benchmark", "data", "model", "method", "retention_ratio", "num_frames", "fps", "max_frames", "out", "cache"),
    *("score", "results"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    parser = Parser("python -m jobs.evaluate", description=__doc__, epilog=EPILOG + EXIT_CODES.format(item="question"))
    return run_command(parser, EvaluateConfig, _evaluate, argv, find_overridden_sampling, USUAL)


def _evaluate(config: EvaluateConfig, console: Console) -> CommandResult:
    """List tasks, lay out the tables of ``--results``, or run an evaluation; return what to print."""
    # Ray, torch and the decoders load only now: --help and a mistyped flag answer at once.
    if config.benchmark == LIST:
        return _list_tasks(console)
    if config.results:
        return _write_tables(config, console)
    with import_libraries(console):
        from pipeline.evaluate.evaluate import evaluate, render_evaluation  # noqa: PLC0415

    result = evaluate(config, console)
    return CommandResult(result.exit_code(config), result.as_record(), [render_evaluation(result)])


def _list_tasks(console: Console) -> CommandResult:
    """List lmms-eval's video tasks, and whether each can be run here; a child process imports lmms-eval.

    Raises:
        UsageError: lmms-eval is not installed.
    """
    from pipeline.evaluate.tasks.process import list_tasks, render_tasks  # noqa: PLC0415

    tasks = list_tasks(make_speaker(console))
    return CommandResult(0, {"tasks": [asdict(task) for task in tasks]}, [render_tasks(tasks)])


def _write_tables(config: EvaluateConfig, console: Console) -> CommandResult:
    """Write the tables of the results in several folders (``--results``), print notes, and return what to print."""
    from pipeline.evaluate.results import write_comparison  # noqa: PLC0415

    layout = write_comparison(config)
    say = make_speaker(console)
    for line in layout.missing:
        say(f"note: {line}")
    return CommandResult(0, layout.as_record(), [layout.render()])


if __name__ == "__main__":
    sys.exit(main())
