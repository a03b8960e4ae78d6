"""One evaluation from its options to its files: the page to read first."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import fmean

import pyarrow.compute as pc
from rich.console import Console, Group, RenderableType
from rich.text import Text

from pipeline.cache.header import HEADER
from pipeline.cache.reader import TokenCache
from pipeline.cache.schema import TOKENS
from pipeline.console import speaker
from pipeline.errors import BUGS, RunFailed
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.benchmarks.items import LoadedQuestions
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.forms import render_table
from pipeline.evaluate.page import format_warned_line
from pipeline.evaluate.protocols import LETTER
from pipeline.evaluate.request import EvaluateRequest, match_results, prepare
from pipeline.evaluate.results import Presentation, table_options, write_results
from pipeline.evaluate.run import ScoredQuestions, answer_and_score, drop_tokens, score_answers
from pipeline.evaluate.scores import write_submissions
from pipeline.evaluate.table import ResultsTable
from pipeline.generate.summary import render_answers
from pipeline.rows import JsonObject
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

# Error classes that another attempt may not meet.
_MAY_SUCCEED = ("corrupt", "io", "out-of-memory", "own-code", "internal")
_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "numpy")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The outcome of an evaluation: its scores, table and ``files`` below ``out``.

    For a benchmark without published answers there is no ``table``, but where to bring its ``submission``.
    """

    done: ScoredQuestions
    table: ResultsTable | None
    out: str
    files: Sequence[str]
    submission: str = ""

    def exit_code(self, config: EvaluateConfig) -> int:
        """Return 1 if too many answers failed, one is missing, none is ok, or something failed by a bug; else 0.

        ``--score`` has only the limit of failed answers.
        """
        answers, videos = self.done.answers, self.done.videos
        if answers is None:
            n_failed = pc.sum(pc.equal(self.done.scores["status"], "failed")).as_py()
            return 1 if n_failed > config.failure_limit(len(self.done.scores)) else 0
        bug = videos is not None and bool(BUGS & videos.failures.keys())
        return 1 if bug else answers.exit_code(config.failure_limit(answers.n_questions))

    def as_record(self) -> JsonObject:
        """Return the outcome JSON-able: files, the main table and its scores, counts of videos and answers.

        ``clusters`` has the number of videos behind each column. Without a table the entries of the table are absent or
        empty.
        """
        answers, videos = self.done.answers, self.done.videos
        columns = [] if self.table is None else self.table.columns
        return {
            **({"notes": []} if self.table is None else self.table.as_record()),
            "out": self.out,
            "files": self.files,
            "scores": [] if self.table is None else list(scores_of(self.table)),
            "clusters": {column.key: column.n_videos for column in columns},
            "submission": self.submission or None,
            "left_out": self.done.n_left_out,
            "videos": None if videos is None else videos.as_record(),
            "answers": None if answers is None else answers.as_record(),
        }


def scores_of(table: ResultsTable) -> Iterator[JsonObject]:
    """Yield a record per row of the table: unrounded scores by the key of their column, ``rel``, and counts of answers.

    Scores and ``rel`` are percentages. A column without a score is left out. ``method`` includes positions that are not
    the model's own.
    """
    for row in table.rows:
        record = table.record_of(row)
        yield {
            "method": row.method + (f",positions={row.positions}" if row.positions else ""),
            "retention_ratio": row.ratio,
            "scores": {key: cell["score"] for key, cell in record["scores"].items()},
            "rel": None if row.rel is None else row.rel.score,
            **{name: record[name] for name in ("kept_share", "unparsed_share", "n_failed", "n_cut", "n_weak")},
        }


def evaluate(config: EvaluateConfig, console: Console) -> Evaluation:
    """Load the questions, encode the videos, answer, score and write the results; ``--score`` only scores and writes.

    Prints notes, the last of them about frames that may be damaged. Raises UsageError (nothing was started) or
    RunFailed (committed rows stay; a rerun resumes). RunFailed also means that the results cannot be written.
    """
    try:
        evaluation = _evaluate_answers(config, console) if config.score else _evaluate_benchmark(config, console)
    except OSError as error:
        raise RunFailed(f"{config.out}: the results cannot be written: {error.strerror or error}") from error
    if line := format_warned_line(evaluation.done.scores):
        speaker(console)(f"note: {line}")
    return evaluation


def _evaluate_benchmark(config: EvaluateConfig, console: Console) -> Evaluation:
    """Encode a benchmark's videos unless cached, answer and score its questions, and write results or submissions.

    Prints notes on the questions. ``--drop-tokens`` deletes the tokens at the end, unless questions may be asked again.
    """
    request, say = prepare(config, console), speaker(console)
    for line in describe_data(request.loaded, request.benchmark):
        say(line)
    scored = answer_and_score(request, console)
    submission, table = request.benchmark.submission, None
    if submission:
        files = write_submissions(request.store, scored.loaded.items, scored.scores, say)
    else:
        table, files = write_results(request.store, scored, _make_presentation(request, scored))
    if config.drop_tokens:
        assert scored.answers is not None
        may_succeed = [scored.answers.failures.get(name, 0) for name in _MAY_SUCCEED]
        if n_unanswered := scored.answers.n_missing + sum(may_succeed):
            console.print(f"note: {n_unanswered} questions may be asked again (--retry-failed): their tokens stay")
        else:
            drop_tokens(request, console)
    return Evaluation(done=scored, table=table, out=config.out, files=files, submission=submission)


def _evaluate_answers(config: EvaluateConfig, console: Console) -> Evaluation:
    """Score the answers that jobs.generate gave, and write tables and page.

    Prints the number of questions without a right answer, which are left out. Raises UsageError if ``out`` has other
    results.
    """
    store = store_at(config.out, Objects.from_environment(config.s3_endpoint, config.s3_requester_pays))
    identity = {"scored": config.score}
    match_results(store, identity)
    scored = score_answers(config)
    if scored.n_left_out:
        console.print(f"note: {scored.n_left_out} questions have no answer to compare with, and are left out")
    table, files = write_results(store, scored, present_answers(config), identity)
    return Evaluation(done=scored, table=table, out=config.out, files=files)


def describe_data(questions: LoadedQuestions, benchmark: Benchmark) -> Iterator[str]:
    """Yield lines for the user: the number of questions, missing parts of splits, kinds of fault with an example."""
    whole = f" of {benchmark.n_questions:,} in the whole benchmark" if benchmark.n_questions else ""
    yield f"{benchmark.title}: {len(questions.items):,} questions to ask; {questions.n_annotated:,} annotated{whole}"
    for split in benchmark.splits:
        present = {item.splits[split.name] for item in questions.items if split.name in item.splits}
        if text := split.describe_parts(present, benchmark.protocol().metric):
            yield f"note: {text}"
    for kind, left_out, count, example in questions.summarise_faults():
        yield f"note: {count} {kind}, {'left out' if left_out else 'kept'}, e.g. {example}"


def _make_presentation(request: EvaluateRequest, scored: ScoredQuestions) -> Presentation:
    """Describe a benchmark's results for tables and page: title, facts about model and run."""
    return Presentation(
        title=request.title,
        benchmark=request.benchmark.stored_in(request.store),
        described=request.identity,
        facts=[*_list_facts(request, scored), *_machine()],
        token_bytes=request.token_bytes,
        names=request.names,
        **table_options(request.config),
    )


def present_answers(config: EvaluateConfig) -> Presentation:
    """Describe the results of scored answers of jobs.generate for tables and page."""
    benchmark = Benchmark(name="answers", title="Answers", protocols=(LETTER,), splits=(Split("split", "Split"),))
    return Presentation(
        title=", ".join(config.score),
        benchmark=benchmark,
        described={"protocol": "as jobs.generate asked", "parser": LETTER.parser},
        facts=_machine(),
        **table_options(config),
    )


def _list_facts(request: EvaluateRequest, scored: ScoredQuestions) -> Iterator[tuple[str, str]]:
    """Yield (name, value) facts about model, cache and run for the report page.

    Reads the size and number of the cached videos, unless the cache was deleted.
    """
    yield "model", request.source.name
    yield "weights", request.source.identity
    yield "videos", f"{len({video for item in request.loaded.items for video in item.video_ids}):,}"
    cache = store_at(request.cache, request.objects)
    if cache.exists(HEADER):
        size, n_videos = (
            sum(file.size for file in cache.list_files(TOKENS)),
            len(TokenCache(request.cache, store=cache)),
        )
        yield "all tokens", f"{size / max(1, n_videos) / 1e6:.1f} MB a video, evidence included"
    if scored.videos is not None:
        seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in scored.videos.seconds.items())
        yield "seconds of encoding", seconds
    if scored.answers is not None and scored.answers.n_new:
        yield "seconds of answering", ", ".join(f"{name} {value:.1f}" for name, value in scored.answers.seconds.items())
    totals = [row for row in scored.scores["n_total"].to_pylist() if row is not None]
    if totals:
        yield "visual tokens", f"{fmean(totals):,.0f} a question on average before pruning"


def _machine() -> list[tuple[str, str]]:
    """Return facts about this machine and the versions of packages."""
    return [
        ("machine", f"{platform.machine()}, {platform.system()}"),
        ("versions", ", ".join(f"{name} {version(name)}" for name in _VERSIONS)),
    ]


def render_evaluation(evaluation: Evaluation) -> RenderableType:
    """Render the table for the terminal (or where to submit), the failures by class, and the files."""
    parts: list[RenderableType] = []
    if evaluation.table is None:
        parts.append(Text(f"no score: the right answers are not published; {evaluation.submission}"))
    else:
        parts += render_table(evaluation.table)
    if evaluation.done.answers is not None:
        parts += ["", render_answers(evaluation.done.answers)]
    return Group(*parts, "", Text(f"{evaluation.out}: {', '.join(evaluation.files)}"))
