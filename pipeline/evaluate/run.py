"""The steps of an evaluation on the driver: encode each video once, answer all questions under all prunings, score."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from gstep import PRUNERS, make_pruner
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.header import (
    HEADER,
    SamplingIdentity,
    compute_fingerprint,
    get_codec,
    has_generated_card,
    list_differences,
    read_header,
)
from pipeline.cache.live import LiveVideos
from pipeline.cache.reader import TokenCache
from pipeline.cache.schema import TOKENS, VIDEOS
from pipeline.console import make_speaker
from pipeline.errors import NotAnswers, RunFailed, UsageError, convert_store_usage_errors
from pipeline.evaluate.benchmarks.annotations import NotAskable
from pipeline.evaluate.benchmarks.base import OWN_NUMBERS
from pipeline.evaluate.benchmarks.items import AnnotationFault, Item, LoadedQuestions, QuestionCollector
from pipeline.evaluate.benchmarks.own import assign_clusters
from pipeline.evaluate.config import ANSWERS_FOLDER, RESULTS_HEADER, EvaluateConfig
from pipeline.evaluate.protocols import LETTER
from pipeline.evaluate.request import EvaluateRequest, match_results, write_results_header
from pipeline.evaluate.scores import AnsweredItems, make_answer_mode, make_score_table, read_answered_item
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio
from pipeline.generate.answers import (
    ANSWER_SCHEMA,
    REMOVED,
    AnswersIdentity,
    AnswersTable,
    iter_answers,
    read_answers,
    read_answers_header,
)
from pipeline.generate.answers import HEADER as ANSWERS_HEADER
from pipeline.generate.config import GenerateConfig
from pipeline.generate.remaining import COMPARED_COLUMNS, describe_change, refuse_changed_questions
from pipeline.generate.removal import bar_videos, read_removal_reasons
from pipeline.generate.run import answer
from pipeline.generate.summary import AnswerSummary, summarize_answers
from pipeline.prune.config import PruneConfig
from pipeline.prune.frame_limits import describe_limits
from pipeline.prune.run import prune
from pipeline.prune.summary import Summary
from pipeline.rows import AnswerRecord, JsonObject, QuestionRecord, drop_nulls
from pipeline.runner.claim import Claim
from pipeline.runner.run_record import RUNS, make_run_id
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import CARD, Store, store_at

MANIFEST = "videos.jsonl"
_SNAP = "snap_to_keyframes_s"  # key of a cache's sampling
DROPPING = "dropping"  # file that marks a cache as being deleted
# The names of the files that runs write into a cache.
_OWN_FILES = re.compile(
    r"tokens/.+-[0-9a-f]{32}\.parquet|videos/.+-\d{6,}-[0-9a-f]{32}\.parquet|videos/sorted-[-0-9a-f]+\.parquet"
    r"|runs/[^/]+\.(json|log)"
)


@dataclass(frozen=True, kw_only=True)
class ScoredQuestions:
    """The questions of an evaluation, their scores, and the counts of answers and videos.

    Attributes:
        loaded: the scored questions, and the faults of the annotations.
        scores: rows of SCORE_SCHEMA.
        answers: None if existing answers of jobs.generate were scored.
        videos: None if no jobs.prune run was necessary.
        n_left_out: the number of answered questions that have no right answer.
    """

    loaded: LoadedQuestions
    scores: pa.Table
    answers: AnswerSummary | None = None
    videos: Summary | None = None
    n_left_out: int = 0


def answer_and_score(request: EvaluateRequest, console: Console) -> ScoredQuestions:
    """Encode missing videos, answer unanswered questions, and return the scores of all answers, which are not written.

    Writes the header of the results before the first run if there is none, and again when the scores are ready, with
    the facts behind them; also the numbers that a benchmark's own code computes, whose notes are printed. Questions
    that this code leaves out become faults of ``loaded``. If questions are unanswered and an earlier run was killed
    while it deleted the cache, this deletion is finished first. Answers made with other method code
    (``request.answers.changed``) are made again.

    Raises:
        UsageError: the request cannot be carried out, or every question is about a removed video.
        RunFailed: a run stopped. Committed rows stay, and a rerun resumes.
        CorruptShard: a file of the cache's videos table or of answers is damaged.
    """
    match_results(request.store, request.identity)
    if not request.store.exists(RESULTS_HEADER):
        write_results_header(request.store, request.identity, request.about)
    todo = _find_unanswered(request)
    if todo and store_at(request.cache, request.objects).exists(DROPPING):
        drop_tokens(request, console)  # finish a deletion that a killed run began
    videos = _encode(request, todo, console) if todo and request.videos is not None else None
    answers = _answer(request, console) if todo or request.answers.changed else None
    live = _select_live_answers(request)
    if answers is None:
        answers = summarize_answers(live, len(request.questions) * len(request.grid), set(), 0.0)
    arms = {
        label: ORIGINAL if spec is None else MethodAtRatio(spec.method_label, spec.retention_ratio)
        for label, spec in request.grid.items()
    }
    answered = AnsweredItems.select(request.loaded.items, arms, live)
    if not answered.items:
        raise UsageError(f"{request.store}: every question is about a removed video, and none is left to score")
    own_scores = request.benchmark.score_replies(answered.items, answered.replies(request.protocol), request.protocol)
    if own_scores is not None:
        request.store.put(OWN_NUMBERS, (json.dumps(own_scores.numbers, indent=1) + "\n").encode())
        for line in own_scores.notes:
            make_speaker(console)(f"note: {line}")
    scores = make_score_table(answered, request.protocol, own_scores)
    # Until now, the facts in the header described the earlier scores.
    write_results_header(request.store, request.identity, request.about)
    scored_ids = set(pc.unique(scores["question_id"]).to_pylist())
    items = tuple(item for item in request.loaded.items if item.question_id in scored_ids)
    uncounted = [
        AnnotationFault("not-counted", item.question_id, f"document {item.question_id}: the task leaves it out", True)
        for item in answered.items
        if item.question_id not in scored_ids
    ]
    loaded = replace(request.loaded, items=items, faults=(*request.loaded.faults, *uncounted))
    return ScoredQuestions(loaded=loaded, scores=scores, answers=answers, videos=videos)


def _open_answers_store(request: EvaluateRequest) -> Store:
    """Return the store of the evaluation's answers."""
    return store_at(request.config.join_out(ANSWERS_FOLDER), request.objects)


def _select_live_answers(request: EvaluateRequest) -> pa.Table:
    """Return the live answers to the questions of a request under its grid."""
    return AnswersTable(_open_answers_store(request), request.answers.identity).select_live_answers(
        request.questions, request.grid
    )


def _find_unanswered(request: EvaluateRequest) -> list[Item]:
    """Return the questions that lack an answer under some arm, in order; without stored answers, all of them.

    With ``--retry-failed``, a failed answer counts as missing. The row of a removed question counts as an answer.

    Raises:
        QuestionsChanged: a question with a good answer now has another text, other videos, choices or decoding.
    """
    if not _open_answers_store(request).exists(ANSWERS_HEADER):
        return list(request.loaded.items)
    questions = {row["question_id"]: drop_nulls(row, QuestionRecord) for row in request.questions.to_pylist()}
    counts = Counter[str]()
    changes = list[str]()
    for row in iter_answers(_select_live_answers(request).select(["question_id", "status", *COMPARED_COLUMNS])):
        good = row["status"] == "ok"
        if good and (text := describe_change(questions[row["question_id"]], row)):
            changes.append(text)
        counts[row["question_id"]] += row["status"] != "failed" or not request.config.retry_failed
    refuse_changed_questions(changes, request.store)
    return [item for item in request.loaded.items if counts[item.question_id] < len(request.grid)]


def _encode(request: EvaluateRequest, items: list[Item], console: Console) -> Summary:
    """Run jobs.prune on the videos of unanswered questions, storing all tokens, and return its counts.

    Writes the manifest of these videos into the results, and prints their number and notes.

    Raises:
        UsageError: jobs.prune refuses the request.
        RunFailed: the run stopped, or no video could be encoded and the cache has none.
    """
    assert request.videos is not None
    folder = Path(str(request.config.data)).absolute()  # video ids are relative to it
    rows = {str(row["video_id"]): row for item in items for row in item.make_manifest_rows(folder)}
    lines = [json.dumps(rows[video_id]) for video_id in sorted(rows)]
    request.store.put(MANIFEST, ("\n".join(lines) + "\n").encode())
    config = PruneConfig(**{**vars(request.videos), "videos": [request.config.join_out(MANIFEST)]})
    console.print(f"{len(rows)} videos; all tokens of each are stored once", highlight=False)
    summary = prune(config, console)
    for line in () if summary.frame_limits is None else describe_limits(summary.frame_limits):
        console.print(f"note: {line}", highlight=False)
    # If every remaining video is broken, its questions fail, but questions on videos cached before can be asked.
    if not summary.n_ok and not len(TokenCache(request.cache, store=store_at(request.cache, request.objects))):
        reasons = "; ".join(f"{name}: {count}, {summary.examples[name][1]}" for name, count in summary.failures.items())
        raise RunFailed(f"none of {len(rows)} videos could be encoded: {reasons}")
    return summary


def _answer(request: EvaluateRequest, console: Console) -> AnswerSummary:
    """Print the number of answers, make all of them in one run of jobs.generate, and return its counts."""
    config = make_answers_config(request)
    evaluation: AnswersIdentity = {"benchmark": request.benchmark.name, "protocol": request.identity}
    n_questions = len(request.questions) * len(request.grid)
    console.print(f"{len(request.questions)} questions under {len(request.grid)} prunings: {n_questions} answers")
    return answer(config, console, request.questions, request.grid, evaluation)


def make_answers_config(request: EvaluateRequest) -> GenerateConfig:
    """Return the options of the jobs.generate run: the protocol's way of answering, and the options in common.

    With vLLM, ``attn`` is "auto".
    """
    source = request.source
    options = request.config
    mode = make_answer_mode(request.protocol, source.model_type)
    shared = options.select_shared_options(GenerateConfig)
    if options.engine == "vllm":
        shared["attn"] = "auto"  # with vLLM, --attn applies to the vision encoder only
    return GenerateConfig(
        cache=request.cache,
        questions=options.benchmark,
        out=options.join_out(ANSWERS_FOLDER),
        model=source.name,
        family=options.family,
        choices=mode.method,
        system=mode.system,
        max_new_tokens=mode.decoding.max_new_tokens,
        temperature=mode.decoding.temperature,
        frame_times=request.protocol.get_rules(source.model_type, source.family).frame_times,
        on_changed=options.on_changed,
        **shared,
    )


def drop_tokens(request: EvaluateRequest, console: Console) -> None:
    """Delete the cache of all tokens, except files that no run wrote, and print how many; do nothing without a cache.

    Videos that were removed from the cache are first recorded as removed in the answers, because no other file will
    name them. The mark DROPPING is written next and deleted last, so that a later run can finish an interrupted
    deletion. The header is deleted before other files, and the folders of tokens, videos and runs at the end if they
    are empty.

    Raises:
        CacheLocked: a run is writing to the cache.
        UsageError: the cache is a symbolic link, whose target may be another user's.
    """
    cache = store_at(request.cache, request.objects)
    folders = (VIDEOS, TOKENS, RUNS)
    if cache.folder is not None and cache.folder.is_symlink():
        raise UsageError(f"--drop-tokens: {cache} is a link to another place, which is yours to delete")
    if not (cache.exists(HEADER) or cache.exists(DROPPING)):
        return
    say = make_speaker(console)
    with Claim(cache, run_id := make_run_id(), say):
        names = [CARD] if has_generated_card(cache) else []
        if cache.exists(HEADER):
            removed_rows = LiveVideos.read_removed(cache, compute_fingerprint(read_header(cache)["identity"]))
            reasons = {row["video_id"]: row["error_message"] for row in removed_rows}
            bar_videos(_open_answers_store(request), run_id, reasons)
            names.insert(0, HEADER)
        cache.put(DROPPING, b"")
        names += [
            file.name for folder in folders for file in cache.list_files(folder) if _OWN_FILES.fullmatch(file.name)
        ]
        for name in (*names, DROPPING):
            cache.delete(name)
    if cache.folder is not None:  # an object store has no empty folders
        for folder in folders:
            with suppress(OSError):
                (cache.folder / folder).rmdir()
    say(f"{cache}: {len(names)} files deleted (--drop-tokens); the answers stay")


def score_answers(config: EvaluateConfig) -> ScoredQuestions:
    """Score answers of jobs.generate to questions with a right answer, by the rule of the protocol ``letter``.

    Each folder of ``config.score`` is one arm. Questions that were removed in one folder, or are about a video that was
    removed from ``config.out``, are left out of all.

    Raises:
        UsageError: a folder cannot be read, has no answers or none to score, its method and ratio occur twice, its
            questions or settings differ from those of the first folder, or jobs.evaluate made its answers.
        CorruptShard: a file of answers is damaged.
    """
    objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
    first_collector = QuestionCollector()
    tables = list[pa.Table]()
    arms = dict[str, MethodAtRatio]()
    settings: JsonObject = {}
    with convert_store_usage_errors():
        answers = [read_answers(place, store=store_at(place, objects)) for place in config.score]
        removed_ids = list_removed(answers, read_removal_reasons(store_at(config.out, objects)))
    for place, rows in zip(config.score, answers, strict=True):
        live = rows.filter(pc.invert(pc.is_in(rows["question_id"], value_set=pa.array(removed_ids, pa.string()))))
        identity = read_answers_header(store_at(place, objects))["identity"]
        arm = _make_arm(identity)
        collector = _collect_answered(live)
        if arm in arms.values():
            raise UsageError(f"--score {place}: {arm.method} at {arm.ratio:g} occurs twice; name each once")
        if not collector.items:
            raise UsageError(f"--score {place}: no question has an answer to compare with; give them a column answer")
        if not arms:
            first_collector = collector
            settings = _select_compared_settings(identity)
        if differences := list_differences(
            settings, _select_compared_settings(identity), old_subject=f"{config.score[0]} has"
        ):
            lines = "\n  ".join(differences)
            raise UsageError(f"--score {place} cannot be compared with {config.score[0]}:\n  {lines}")
        if first_collector.items != collector.items:
            raise UsageError(f"--score {place} has other questions than {config.score[0]}; score it separately")
        arms[place] = arm
        live = live.select(ANSWER_SCHEMA.names)  # the columns that questions carry may differ in type
        tables.append(live.set_column(live.schema.get_field_index("pruning"), "pruning", pa.repeat(place, len(live))))
    questions = first_collector.finish(config.score[0], "give the questions a column answer")
    items = assign_clusters(questions.items)
    scores = make_score_table(AnsweredItems.select(items, arms, pa.concat_tables(tables)), LETTER)
    n_left_out = sum(fault.left_out for fault in questions.faults)
    return ScoredQuestions(loaded=replace(questions, items=tuple(items)), scores=scores, n_left_out=n_left_out)


def list_removed(answers: Iterable[pa.Table], barred: Collection[str]) -> list[str]:
    """Return the sorted ids of the questions that are removed in one of these tables, or about a ``barred`` video."""
    return sorted(
        {
            row["question_id"]
            for table in answers
            for row in table.select(["question_id", "status", "video_ids"]).to_pylist()
            if row["status"] == REMOVED or any(video_id in barred for video_id in row["video_ids"])
        }
    )


def _collect_answered(live: pa.Table) -> QuestionCollector:
    """Collect the questions of these answers; a repeated id or a question without a published answer becomes a fault.

    Raises:
        QuestionsError: a split or cluster is neither text nor a whole number.
    """
    collector = QuestionCollector()
    for row in live.to_pylist():
        item = read_answered_item(drop_nulls(row, AnswerRecord))
        where = f"question {row['question_id']}"
        if item is None:
            collector.leave_out(where, row["question_id"], NotAskable("bad-row", "it has no right answer"))
        else:
            collector.keep(where, item)
    return collector


def _select_compared_settings(identity: AnswersIdentity) -> JsonObject:
    """Return the settings that two sets of answers must share for their scores to be compared."""
    prompt = {name: value for name, value in identity.get("prompt", {}).items() if name != "order"}
    sampling = {name: value for name, value in _get_sampling(identity).items() if name != _SNAP}
    cache: JsonObject = {"preprocessing": identity["cache"].get("preprocessing"), "sampling": sampling}
    model = cast(JsonObject | None, identity.get("model"))
    return {"model": model, "decoding": identity.get("decoding"), "prompt": prompt, "cache": cache}


def _get_sampling(identity: AnswersIdentity) -> SamplingIdentity:
    """Return how the frames of the cache were sampled; {} if an old header does not state it."""
    return identity["cache"].get("sampling") or {}


def _make_arm(identity: AnswersIdentity) -> MethodAtRatio:
    """Return the arm of a set of answers: its ratio, and its method with settings that differ from the defaults.

    These are parameters, a seed other than 0, a snap to keyframes, and a codec other than bfloat16.

    Raises:
        NotAnswers: jobs.evaluate made the answers.
    """
    if "prunings" in identity:
        raise NotAnswers("these are answers of jobs.evaluate, which scores them itself: run it again with its options")
    method = identity.get("pruner") or identity["cache"]["pruner"]
    snap = _get_sampling(identity).get(_SNAP)
    label = _make_label(method["method"], method["params"])
    label += f",seed={seed}" if (seed := method.get("seed", 0)) else ""
    label += "" if snap is None else f",{_SNAP}={snap:g}"
    codec = get_codec(identity["cache"])
    return MethodAtRatio(
        label if codec is BFLOAT16 else f"{label},token_codec={codec.name}", float(identity["retention_ratio"])
    )


def _make_label(method: str, params: JsonObject) -> str:
    """Return the method with the parameters that differ from its defaults, such as ``fastv,K=3``.

    A user method gets all its parameters, because its code must not be loaded just to read answers.
    """
    usual: JsonObject = {}
    if method in PRUNERS:
        rules = PRUNERS[method].family_parameter
        usual = make_pruner(method, **{name: params[name] for name in params if name == rules}).params()
    settings = [
        f"{name}={value}" for name, value in sorted(params.items()) if name not in usual or usual[name] != value
    ]
    return ",".join([method, *settings])
