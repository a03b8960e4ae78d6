"""Score pruning methods on a benchmark: each video is encoded once, every method and ratio answers from that."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from jobs.command import EXIT_CODES, Parser, loading, other_sampling, run_command
from jobs.frame.json_document import Done
from jobs.frame.stores import saying
from pipeline.evaluate.config import EvaluateConfig

EPILOG = """\
examples:
  python -m jobs.evaluate --benchmark videomme --data Video-MME --model llava-hf/llava-onevision-qwen2-7b-ov-hf \\
      --method gstep vidcom2 fps --retention-ratio .10 .15 .20 .25 --out results
  python -m jobs.evaluate --benchmark questions.jsonl --data videos --method gstep fastv,K=3
  python -m jobs.evaluate --benchmark questions.jsonl --data videos --method gstep random,seed=0..4
  python -m jobs.evaluate --score answers answers-10            score what jobs.generate answered
  python -m jobs.evaluate --results r/videomme r/mlvu r/mvbench --out table            one table of several benchmarks
  python -m jobs.evaluate --results r/videomme --reference vidcom2 --out pairs         differences to another method

The same command again goes on where the last one stopped; more methods or ratios are answered beside those that are
there. --out gets scores.parquet, tables.md, tables.tex, tables.json and report.html.

"""

#: The options that --help shows.
USUAL = (
    *("benchmark", "data", "model", "method", "retention_ratio", "num_frames", "fps", "max_frames", "out", "cache"),
    *("score", "results"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Score pruning methods on a benchmark, or lay out tables of results; return the exit code."""
    parser = Parser("python -m jobs.evaluate", description=__doc__, epilog=EPILOG + EXIT_CODES.format(item="question"))
    return run_command(parser, EvaluateConfig, _evaluate, argv, other_sampling, USUAL)


def _evaluate(config: EvaluateConfig, console: Console) -> Done:
    """Run the evaluation, or lay out given results, and print the tables."""
    # Ray, torch and the decoders load only now: --help and a mistyped flag answer at once.
    if config.results:
        return _lay_out(config, console)
    with loading(console):
        from pipeline.evaluate.evaluate import evaluate, render_evaluation  # noqa: PLC0415

    done = evaluate(config, console)
    return Done(done.exit_code(config), done.as_record(), [render_evaluation(done)])


def _lay_out(config: EvaluateConfig, console: Console) -> Done:
    """Write and print one table of the results in several folders."""
    from pipeline.evaluate.forms import markdown  # noqa: PLC0415
    from pipeline.evaluate.results import lay_out  # noqa: PLC0415

    laid, say = lay_out(config), saying(console)
    for line in laid.missing:
        say(f"note: {line}")
    print(markdown(*laid.tables))
    say(f"{laid.out}: {', '.join(laid.files)}")
    return Done(0, {"out": laid.out, "files": laid.files, "missing": laid.missing, **laid.tables[0].as_record()})


if __name__ == "__main__":
    sys.exit(main())
