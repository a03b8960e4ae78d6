"""Answer questions about cached videos with the language model, on Ray: no video and no vision encoder is needed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from jobs.command import EXIT_CODES, Parser, import_libraries, run_command
from jobs.frame.json_document import CommandResult
from pipeline.generate.config import GenerateConfig

EPILOG = """\
examples:
  python -m jobs.generate cache --questions questions.jsonl --out answers
  python -m jobs.generate cache --questions questions.jsonl --out answers-10 --retention-ratio 0.10
  python -m jobs.generate cache --ask "What happens here?" --out captions
  python -m jobs.generate cache --questions mmmu.parquet --choices loglikelihood --format jsonl

Rerun the same command to resume; it does nothing if every question has an answer.
"""

#: The options that --help shows.
USUAL = (
    *("cache", "questions", "ask", "out", "model", "retention_ratio", "pruner", "choices", "engine", "system"),
    *("max_new_tokens", "temperature", "retry_failed", "limit"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer questions from a cache; return the exit code."""
    parser = Parser("python -m jobs.generate", description=__doc__, epilog=EPILOG + EXIT_CODES.format(item="question"))
    return run_command(parser, GenerateConfig, _generate, argv, usual=USUAL)


def _generate(config: GenerateConfig, console: Console) -> CommandResult:
    """Answer the questions; return the exit code, the record, and the summary with a command that reads the answers.

    The exit code depends on how many questions failed.

    Raises:
        UsageError: the questions, the cache or an option cannot be used.
        RunFailed: the run stopped before every question had an answer.
    """
    # Ray, torch and transformers load only now: --help and a mistyped flag answer at once.
    with import_libraries(console):
        from pipeline.generate.run import answer  # noqa: PLC0415
        from pipeline.generate.summary import render_answers  # noqa: PLC0415

    summary = answer(config, console)
    rows = (
        f'read_answers({json.dumps(config.out)}).select(["question_id", "choices", "answer"]).slice(0, 5).to_pylist()'
    )
    code = f'from pipeline import read_answers; print(*{rows}, sep="\\n")'
    read = f"read the first: python -c {shlex.quote(code)}"
    exit_code = summary.exit_code(config.compute_failure_limit(summary.n_questions))
    return CommandResult(exit_code, {"out": config.out, **summary.as_record()}, [render_answers(summary), "", read])


if __name__ == "__main__":
    sys.exit(main())
