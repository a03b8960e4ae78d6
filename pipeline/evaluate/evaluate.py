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
from pipeline.console import make_speaker
from pipeline.errors import BUGS, RunFailed
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.benchmarks.items import LoadedQuestions
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.forms import render_table
from pipeline.evaluate.page import format_warned_line
from pipeline.evaluate.protocols import LETTER
from pipeline.evaluate.request import EvaluateRequest, match_results, prepare
from pipeline.evaluate.results import Presentation, select_table_options, write_results
from pipeline.evaluate.run import ScoredQuestions, answer_and_score, drop_tokens, score_answers
from pipeline.evaluate.scores import write_submissions
from pipeline.evaluate.table import ResultsTable
from pipeline.generate.summary import render_answers
from pipeline.rows import JsonObject
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

# Error classes of answers that may succeed at another attempt.
_MAY_SUCCEED = ("corrupt", "io", "out-of-memory", "own-code", "internal")
_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "numpy")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The outcome of an evaluation.

    Attributes:
        table: the main table; None if the right answers are not published.
        out: the results folder or URI.
        files: the names of the written files.
        submission: where to submit the choices if the right answers are not published; otherwise "".
    """

    done: ScoredQuestions
    table: ResultsTable | None
    out: str
    files: Sequence[str]
    submission: str = ""

    def exit_code(self, config: EvaluateConfig) -> int:
        """Return 1 if too many answers failed, one is missing, none is good, or a bug made something fail; otherwise 0.

        Too many are more than ``config.compute_failure_limit`` allows. With ``--score``, only this counts. With
        ``--benchmark``, a video that failed by a bug counts too.
        """
        answers, videos = self.done.answers, self.done.videos
        if answers is None:
            n_failed = pc.sum(pc.equal(self.done.scores["status"], "failed")).as_py()
            return 1 if n_failed > config.compute_failure_limit(len(self.done.scores)) else 0
        bug = videos is not None and bool(BUGS & videos.failures.keys())
        return 1 if bug else answers.exit_code(config.compute_failure_limit(answers.n_questions))

    def as_record(self) -> JsonObject:
        """Return the outcome as a JSON-able record: files, main table, scores, and counts of videos and answers.

        ``clusters`` holds the number of videos behind each column. Without a table, ``scores``, ``clusters`` and
        ``notes`` are empty, and the other entries of the table are absent.
        """
        answers, videos = self.done.answers, self.done.videos
        columns = [] if self.table is None else self.table.columns
        return {
            **({"notes": []} if self.table is None else self.table.as_record()),
            "out": self.out,
            "files": self.files,
            "scores": [] if self.table is None else list(iter_row_scores(self.table)),
            "clusters": {column.key: column.n_videos for column in columns},
            "submission": self.submission or None,
            "left_out": self.done.n_left_out,
            "videos": None if videos is None else videos.as_record(),
            "answers": None if answers is None else answers.as_record(),
        }


def iter_row_scores(table: ResultsTable) -> Iterator[JsonObject]:
    """Yield a record for each row of the table: its unrounded scores by column key, ``rel``, and counts of its answers.

    Scores and ``rel`` are percentages. Columns without a score are left out. ``method`` includes positions other than
    the default.
    """
    for row in table.rows:
        record = table.make_row_record(row)
        yield {
            "method": row.method + (f",positions={row.positions}" if row.positions else ""),
            "retention_ratio": row.ratio,
            "scores": {key: cell["score"] for key, cell in record["scores"].items()},
            "rel": None if row.rel is None else row.rel.score,
            **{name: record[name] for name in ("kept_share", "unparsed_share", "n_failed", "n_cut", "n_weak")},
        }


def evaluate(config: EvaluateConfig, console: Console) -> Evaluation:
    """Run the evaluation: encode missing videos, answer unanswered questions, score all answers and write the results.

    With ``config.score``, only score existing answers of jobs.generate and write the results. Progress and notes go to
    the console; a last note names answers from frames that may be damaged, if there are any.

    Raises:
        UsageError: the request cannot be carried out. Nearly all causes are found before anything is started; a cache
            that is a link and cannot be dropped, for example, only at the end.
        RunFailed: a run stopped, and a rerun resumes from its committed rows; or an OSError occurred anywhere.
        CorruptShard: a stored file of videos or answers is damaged.
    """
    try:
        evaluation = _evaluate_answers(config, console) if config.score else _evaluate_benchmark(config, console)
    except OSError as error:
        raise RunFailed(f"{config.out}: the results cannot be written: {error.strerror or error}") from error
    if line := format_warned_line(evaluation.done.scores):
        make_speaker(console)(f"note: {line}")
    return evaluation


def _evaluate_benchmark(config: EvaluateConfig, console: Console) -> Evaluation:
    """Encode, answer and score a benchmark, and write the results, or submissions if its answers are not published.

    Prints notes about the annotations before the first run. With ``--drop-tokens``, the cached tokens are deleted at
    the end, unless answers are missing or failed with a class of ``_MAY_SUCCEED``; a note then says so.

    Raises:
        UsageError: the request cannot be carried out; with a cache that is a link and cannot be dropped, or a form of
            server scores that became malformed meanwhile, only after the runs.
    """
    request = prepare(config, console)
    say = make_speaker(console)
    for line in describe_data(request.loaded, request.benchmark):
        say(line)
    scored = answer_and_score(request, console)
    submission = request.benchmark.submission
    table = None
    if submission:
        files = write_submissions(request.store, scored.loaded.items, scored.scores, say)
    else:
        table, files = write_results(request.store, scored, _make_presentation(request, scored))
    if config.drop_tokens:
        assert scored.answers is not None
        may_succeed = [scored.answers.failures.get(name, 0) for name in _MAY_SUCCEED]
        if n_unanswered := scored.answers.n_missing + sum(may_succeed):
            console.print(f"note: {n_unanswered} questions may be asked again (--retry-failed), so the tokens are kept")
        else:
            drop_tokens(request, console)
    return Evaluation(done=scored, table=table, out=config.out, files=files, submission=submission)


def _evaluate_answers(config: EvaluateConfig, console: Console) -> Evaluation:
    """Score answers of jobs.generate, and write the scores, tables and report page.

    Prints how many questions were left out because they have no right answer, if any.

    Raises:
        UsageError: ``out`` holds other results, or the answers cannot be scored or compared.
    """
    store = store_at(config.out, Objects.from_environment(config.s3_endpoint, config.s3_requester_pays))
    identity = {"scored": config.score}
    match_results(store, identity)
    scored = score_answers(config)
    if scored.n_left_out:
        console.print(f"note: {scored.n_left_out} questions have no answer to compare with, and are left out")
    table, files = write_results(store, scored, make_answers_presentation(config), identity)
    return Evaluation(done=scored, table=table, out=config.out, files=files)


def describe_data(questions: LoadedQuestions, benchmark: Benchmark) -> Iterator[str]:
    """Yield lines for the user: the number of questions, a note on each split, and the faults by kind.

    The note names the values of the split without a question and, if the score is a mean over the split's values, how
    many they are; a split with neither gets none. A fault's line has its count, an example, and whether its questions
    are kept.
    """
    whole = f" of {benchmark.n_questions:,} in the whole benchmark" if benchmark.n_questions else ""
    yield f"{benchmark.title}: {len(questions.items):,} questions to ask; {questions.n_annotated:,} annotated{whole}"
    for split in benchmark.splits:
        present = {item.splits[split.name] for item in questions.items if split.name in item.splits}
        if text := split.describe_values(present, benchmark.protocol().metric):
            yield f"note: {text}"
    for kind, left_out, count, example in questions.summarize_faults():
        yield f"note: {count} {kind}, {'left out' if left_out else 'kept'}, e.g. {example}"


def _make_presentation(request: EvaluateRequest, scored: ScoredQuestions) -> Presentation:
    """Return how to present a benchmark's results: title, identity, facts about model and run, and table options."""
    return Presentation(
        title=request.title,
        benchmark=request.benchmark.load_stored_settings(request.store),
        described=request.identity,
        facts=[*_list_facts(request, scored), *_describe_machine()],
        token_bytes=request.token_bytes,
        names=request.names,
        **select_table_options(request.config),
    )


def make_answers_presentation(config: EvaluateConfig) -> Presentation:
    """Return how to present scored answers of jobs.generate: with their folders as title and a stand-in benchmark."""
    benchmark = Benchmark(name="answers", title="Answers", protocols=(LETTER,), splits=(Split("split", "Split"),))
    return Presentation(
        title=", ".join(config.score),
        benchmark=benchmark,
        described={"protocol": "as jobs.generate asked", "parser": LETTER.parser},
        facts=_describe_machine(),
        **select_table_options(config),
    )


def _list_facts(request: EvaluateRequest, scored: ScoredQuestions) -> Iterator[tuple[str, str]]:
    """Yield (name, value) facts for the report page: model, weights, number of videos, cache size, seconds of runs.

    The cache size is the mean per video, if the cache still exists; the seconds are those of runs that took place now.
    The last fact is the mean number of visual tokens per question before pruning, if known.
    """
    yield "model", request.source.name
    yield "weights", request.source.identity
    yield "videos", f"{len({video for item in request.loaded.items for video in item.video_ids}):,}"
    cache = store_at(request.cache, request.objects)
    if cache.exists(HEADER):
        size = sum(file.size for file in cache.list_files(TOKENS))
        n_videos = len(TokenCache(request.cache, store=cache))
        yield "all tokens", f"{size / max(1, n_videos) / 1e6:.1f} MB a video, evidence included"
    if scored.videos is not None:
        seconds = ", ".join(f"{stage} {value:.1f}" for stage, value in scored.videos.seconds.items())
        yield "seconds of encoding", seconds
    if scored.answers is not None and scored.answers.n_new:
        yield "seconds of answering", ", ".join(f"{name} {value:.1f}" for name, value in scored.answers.seconds.items())
    totals = [row for row in scored.scores["n_total"].to_pylist() if row is not None]
    if totals:
        yield "visual tokens", f"{fmean(totals):,.0f} a question on average before pruning"


def _describe_machine() -> list[tuple[str, str]]:
    """Return (name, value) facts: this machine's architecture and system, and package versions."""
    return [
        ("machine", f"{platform.machine()}, {platform.system()}"),
        ("versions", ", ".join(f"{name} {version(name)}" for name in _VERSIONS)),
    ]


def render_evaluation(evaluation: Evaluation) -> RenderableType:
    """Render the table for the terminal (or where to submit), then the counts of answers and the names of the files."""
    parts: list[RenderableType] = []
    if evaluation.table is None:
        parts.append(Text(f"no score: the right answers are not published; {evaluation.submission}"))
    else:
        parts += render_table(evaluation.table)
    if evaluation.done.answers is not None:
        parts += ["", render_answers(evaluation.done.answers)]
    return Group(*parts, "", Text(f"{evaluation.out}: {', '.join(evaluation.files)}"))
