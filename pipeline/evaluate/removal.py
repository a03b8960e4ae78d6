"""Remove videos from results for good: from answers, scores, tables, report page and submissions."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import ModelIdentity
from pipeline.cache.schema import write_parquet
from pipeline.errors import NotAnswers
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import OWN_NUMBERS
from pipeline.evaluate.benchmarks.items import LoadedQuestions
from pipeline.evaluate.config import ANSWERS_FOLDER, EvaluateConfig
from pipeline.evaluate.evaluate import make_answers_presentation
from pipeline.evaluate.request import read_results_header
from pipeline.evaluate.results import (
    REPORT,
    TABLES_JSON,
    TABLES_MD,
    TABLES_TEX,
    Presentation,
    read_scores,
    write_results,
)
from pipeline.evaluate.run import MANIFEST, ScoredQuestions, list_removed
from pipeline.evaluate.scores import FORM, SCORE_SCHEMA, SCORES, SUBMISSIONS
from pipeline.evaluate.statistics import ORIGINAL
from pipeline.generate.answers import HEADER as ANSWERS_HEADER
from pipeline.generate.answers import AnswersTable, read_answers
from pipeline.generate.removal import AnswersRemoval, bar_videos, remove_answers
from pipeline.rows import JsonObject
from pipeline.runner.removal import delete_unfinished
from pipeline.runner.run_record import make_run_id
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at

_PAGES = "pages"  # folder of older results, with pages that show frames of some videos
_WRITTEN = (OWN_NUMBERS, SCORES, TABLES_MD, TABLES_TEX, TABLES_JSON, REPORT)


@dataclass
class ResultsRemoval(AnswersRemoval):
    """The result of a removal from the results of an evaluation.

    Attributes:
        scores: the number of score rows that this call removed.
        left: the number of questions that still have scores.
        written: the names of the rewritten files.
    """

    scores: int = 0
    left: int = 0
    written: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield lines for the user: those on the answers, then removed scores, remaining questions and rewritten files.

        If the numbers of a benchmark's own code were emptied, a last line says how to compute them again.
        """
        yield from super().lines()
        files = f": {', '.join(self.written)}" if self.written else ""
        yield f"{self.scores:,} scores removed, {self.left:,} questions are left{files}"
        if OWN_NUMBERS in self.written:
            yield (
                f"note: {OWN_NUMBERS} has no numbers now, since they included removed questions: rerun the "
                "jobs.evaluate command of these results to compute them without these questions"
            )


def remove_results(
    store: Store, ids: Sequence[str], reason: str, say: Callable[[str], object], objects: Objects
) -> ResultsRemoval:
    """Remove videos from the results of an evaluation; after an interruption, the same call resumes.

    Questions about a removed video lose their answers and scores, and the video is barred from later runs; answers in
    other folders that were only scored here stay. Tables and report page are made again from the other scores (unless
    the benchmark publishes no answers), and numbers of the benchmark's own code are emptied. If no question is left,
    all these files, scores and submissions are deleted, but not the form of server scores. The pages of older results
    and temporary files of stopped writers are deleted. A cache below the results is not touched.

    Args:
        ids: the ids of the videos; unknown ids are barred too.
        reason: stored with each barred video.
        say: gets notes for the user.

    Raises:
        NotResults: ``store`` holds no results, or its scores are damaged; nothing was removed.
        NotAnswers: the header of the answers is missing or damaged.
        UsageError: the benchmark is unknown, or the tables cannot be computed.
        CacheLocked: a run is writing to the answers.
        CorruptShard: a file of answers, or of earlier removals, is damaged.
    """
    identity = cast(JsonObject, read_results_header(store)["identity"])
    scores = SCORE_SCHEMA.empty_table()
    if store.exists(SCORES):  # damaged scores end the command here, before anything is deleted
        scores = read_scores(str(store), store, published=False, columns=SCORE_SCHEMA.names)
    answers = store_at(f"{store}/{ANSWERS_FOLDER}", objects)
    is_scored = "scored" in identity
    if not is_scored and (answers.exists(ANSWERS_HEADER) or AnswersTable(answers).names()):
        result = ResultsRemoval(**vars(remove_answers(answers, ids, reason, say)))
    else:  # scored answers are in other folders, and an evaluation that was stopped early has no answers
        bar_videos(store if is_scored else answers, make_run_id(), dict.fromkeys(ids, reason))
        result = ResultsRemoval("", len(ids))
    removed_ids = _find_questions(store, identity, ids, objects, say)
    # For a question about several videos, the scores store only the first video.
    is_removed = pc.or_(
        pc.is_in(scores["question_id"], value_set=pa.array(removed_ids, pa.string())),
        pc.is_in(scores["video_id"], value_set=pa.array(ids, pa.string())),
    )
    result.questions = sorted({*removed_ids, *scores["question_id"].filter(is_removed).to_pylist()})
    result.scores = pc.sum(is_removed).as_py() or 0
    other_scores = scores.filter(pc.invert(is_removed))
    result.left = pc.count_distinct(other_scores["question_id"]).as_py()
    _drop_rows(store, frozenset(ids), frozenset(result.questions))
    old_names = {file.name for file in store.list_files(_PAGES)}
    if result.left:
        changed = _clear_benchmark_numbers(store) if result.questions else []
        result.written = [*changed, *_write_remaining_results(store, identity, other_scores)]
    else:  # no question is left to make tables of
        old_names |= {name for name in (*_WRITTEN, *store.names(SUBMISSIONS, ".json")) if store.exists(name)} - {FORM}
    for name in sorted(old_names):
        store.delete(name)
    result.deleted += [*sorted(old_names), *delete_unfinished(store, ("", SUBMISSIONS, _PAGES))]
    return result


def _find_questions(
    store: Store, identity: JsonObject, ids: Sequence[str], objects: Objects, say: Callable[[str], object]
) -> list[str]:
    """Return the sorted ids of the questions whose answers were removed or are about one of these videos.

    Reads the answers below the results, or the folders whose answers were scored; one that holds no answers or cannot
    be read is skipped with a note.
    """
    scored_places = cast(Sequence[str], identity.get("scored", [f"{store}/{ANSWERS_FOLDER}"]))
    tables = list[pa.Table]()
    for place in scored_places:
        try:
            tables.append(read_answers(place, store=store_at(place, objects)))
        except (NotAnswers, OSError) as error:
            say(
                f"note: the answers that were scored cannot be read ({error}): a question about several videos is "
                "removed here only if the first of them is. Run this command where they are"
            )
    return list_removed(tables, frozenset(ids))


def _drop_rows(store: Store, ids: Collection[str], question_ids: Collection[str]) -> None:
    """Rewrite the manifest without these videos, and submissions without these questions, if these files exist.

    The form of server scores stays unchanged.
    """
    if store.exists(MANIFEST):
        lines = store.read(MANIFEST).decode().split("\n")
        other_lines = [line for line in lines if not line or json.loads(line)["video_id"] not in ids]
        store.put(MANIFEST, "\n".join(other_lines).encode())
    for name in store.names(SUBMISSIONS, ".json"):
        if name != FORM:
            choices = json.loads(store.read(name)).items()
            left_choices = {question_id: choice for question_id, choice in choices if question_id not in question_ids}
            store.put(name, json.dumps(left_choices, indent=1).encode())


def _clear_benchmark_numbers(store: Store) -> list[str]:
    """Empty the numbers that a benchmark's own code computed; return [the file's name], or [] without this file."""
    if not store.exists(OWN_NUMBERS):
        return []
    record = json.loads(store.read(OWN_NUMBERS))
    store.put(OWN_NUMBERS, (json.dumps({**record, "numbers": {}}, indent=1) + "\n").encode())
    return [OWN_NUMBERS]


def _write_remaining_results(store: Store, identity: JsonObject, scores: pa.Table) -> list[str]:
    """Write the scores, and the tables and report page computed from them; return the names of the written files.

    The draws, seed and reference are those of the existing tables; of the page's facts, only model and weights remain.
    For a benchmark without published answers, only the scores are written.
    """
    is_scored = "scored" in identity
    benchmark = None if is_scored else find_benchmark(str(identity["benchmark"])).load_stored_settings(store)
    if benchmark is not None and benchmark.submission:
        store.put(SCORES, write_parquet(scores))
        return [SCORES]
    options = _read_options(store)
    if benchmark is None:
        places = [*cast(Sequence[str], identity["scored"])]
        presentation = make_answers_presentation(EvaluateConfig(score=places, **options))
    else:
        about = cast(Mapping[str, Any], read_results_header(store).get("about", {}))
        model = cast(ModelIdentity, identity["model"])
        presentation = Presentation(
            title=f"{benchmark.title}, {about.get('model', model['weights'])}",
            benchmark=benchmark,
            described=identity,
            facts=[("model", str(about.get("model", ""))), ("weights", model["weights"])],
            token_bytes=about.get("token_bytes"),
            names=about.get("names", {}),
            **options,
        )
    scored = ScoredQuestions(loaded=LoadedQuestions((), (), 0), scores=scores)
    return write_results(store, scored, presentation)[1]


def _read_options(store: Store) -> dict[str, Any]:
    """Return the draws, seed and reference of the existing tables; {} if these cannot be read.

    Full retention as the reference is left out, since it may have been a default.
    """
    try:
        table = json.loads(store.read(TABLES_JSON))[0]
        return {name: table[name] for name in ("draws", "seed")} | (
            {} if table["reference"] == ORIGINAL.method else {"reference": table["reference"]}
        )
    except (OSError, ValueError, LookupError, TypeError):
        return {}
