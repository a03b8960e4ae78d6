"""One run of answering: questions -> answer (GPU actors: cached tokens -> prompt -> language model) -> commits.

``answer`` is the whole run. ``python -m jobs.generate`` calls it, and so does ``answer_questions`` from Python.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from rich.console import Console

from gstep.backbones import choose_runtime
from pipeline.cache.merging import MAX_WAITING_AT_END, MAX_WAITING_FILES
from pipeline.cache.reader import TokenCache
from pipeline.console import Say, speaker
from pipeline.errors import RunFailed, UsageError, usage_errors
from pipeline.generate.answer_setup import AnswerSetup
from pipeline.generate.answerer import STAGE, Answerer, group_by_videos, pack_blocks, unpack_answers
from pipeline.generate.answers import (
    KEYS,
    PRUNINGS,
    AnswersIdentity,
    AnswersTable,
    answer_key,
    commit_answers,
    find_code,
    format_answered,
    format_encoded_again,
    format_new_targets,
    list_shards,
    read_answers_header,
    select_remaining_questions,
    try_merge_answers,
    write_answers_header,
)
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import choose_batch_size
from pipeline.generate.late_pruning import PruningSpec
from pipeline.generate.questions import QUESTION_SCHEMA, AnswerMode, find_count_from_1, read_given_questions
from pipeline.generate.removal import format_removed
from pipeline.generate.request import AnswerRequest, check_request
from pipeline.generate.summary import AnswerSummary, summarise_answers
from pipeline.options import make_config
from pipeline.rows import AnswerRecord, QuestionRecord, without_nulls
from pipeline.runner.claim import Claim
from pipeline.runner.cluster import cap_gpus, check_device, choose_device, node_selector, provenance, sum_resources
from pipeline.runner.job import Job, Watch, convert_store_errors, print_options
from pipeline.runner.library import ProgressOption, check_outcome, make_console, run_here
from pipeline.runner.monitor import Monitor
from pipeline.runner.run_record import RunFile
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import MAX_BLOCKS, Plan, Stage, StageWords, Wording, add_stage
from pipeline.runner.stream import Stream, commit_all

ANSWERING = Wording(
    doing="answering",
    item="question",
    stages={STAGE: StageWords("asked", "look at that host, its GPU, and the storage of the cache")},
    to_lower="--workers",
)
_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow")


def answer(
    config: GenerateConfig,
    console: Console,
    questions: pa.Table | None = None,
    specs: Mapping[str, PruningSpec | None] | None = None,
    evaluation: AnswersIdentity | None = None,
    *,
    here: bool = False,
) -> AnswerSummary:
    """Bring the answers ``config.out`` up to date with the questions, and return their counts.

    Args:
        questions, specs, evaluation: as of ``check_request``.
        here: answer in this process instead of on Ray, and commit every batch, so that a killed run loses one.

    Raises UsageError (nothing was started), CorruptShard, or RunFailed (committed rows stay; a rerun resumes).
    """
    say = speaker(console)
    with convert_store_errors(say):
        request = check_request(config, console, questions, specs, evaluation)
        print_options(config, console)
        store = request.store
        store.make()
        with Claim(store, request.run_id, say, join=config.join) as claim:
            identity, is_code_changed = request.match()  # another run may have written before the claim was made
            start = time.monotonic()
            if is_code_changed:  # from now on rows by other code are not live
                say(f"note: a method has other code now: its questions in {store} are asked again")
                _write_header(request, identity)
            table = AnswersTable(store, identity)
            todo = list_remaining(request, identity, table, say)
            with Monitor(store, request.run_id, claim.set_progress) as monitor:
                if not todo:
                    check_device(config, say)
                record = _answer_remaining(request, identity, todo, console, monitor, here=here) if todo else None
            wall_s = time.monotonic() - start
            live = table.select_live_of(request.questions, request.setup.prunings)
            summary = summarise_answers(live, request.n_questions, set(map(answer_key, todo)), wall_s)
            summary = replace(summary, out=str(store), log=monitor.log)
            if record is not None:
                record.save(summary=summary.as_record())
                try_merge_answers(store, MAX_WAITING_AT_END, say)
    return summary


def list_remaining(
    request: AnswerRequest, identity: AnswersIdentity, table: AnswersTable, say: Say
) -> list[QuestionRecord]:
    """Return the questions still to ask, under each pruning, and print how many have answers already.

    Raises QuestionsChanged if a question with a good answer has changed.
    """
    store, config, forecast = request.store, request.config, request.forecast
    live = table.select_live_of(request.questions, request.setup.prunings)
    to_ask = request.questions.select(QUESTION_SCHEMA.names)
    codes = {name: find_code(identity, name) for name in request.setup.prunings}
    todo = select_remaining_questions(store, live, to_ask, codes, config, forecast.cached, forecast.removed)
    lines = [
        *format_answered(live, request.n_questions, todo, config),
        *format_removed(store, live, todo, forecast.removed),
        *format_encoded_again(store, live, request.video_runs),
    ]
    if not request.is_evaluation:
        lines += format_new_targets(store, live, request.questions)
        targets = zip(*(request.questions[name].to_pylist() for name in ("target", "choices")), strict=True)
        if reason := find_count_from_1(targets):
            lines.append(f"note: {reason}; jobs.evaluate --score refuses these")
    for line in lines:
        say(line)
    return todo


def _answer_remaining(
    request: AnswerRequest,
    identity: AnswersIdentity,
    todo: list[QuestionRecord],
    console: Console,
    monitor: Monitor,
    *,
    here: bool,
) -> RunFile:
    """Commit the rows that need no model, then answer the other questions, if any; return the run's record.

    Joins or starts the cluster only if a question needs a model. Raises UsageError before any row is written, RunFailed.
    """
    config, setup, say = request.config, request.setup, speaker(console)
    for_model, settled_rows = request.forecast.split(todo)
    if for_model:  # before any row is written: the cluster may lack the resources of the flags
        device, dtype = _choose_device_here(config) if here else _choose_device_of_cluster(config, say)
        setup = replace(setup, device=device, dtype=dtype)
    _write_header(request, identity)
    facts = provenance(request.run_id, _RECORDED_VERSIONS)
    record = RunFile(request.store, {**facts, "config": config.as_record(), "questions": len(todo)})
    with record:
        done = CommittedAnswers(request, record, monitor, say)
        done.commit_settled(settled_rows)
        if for_model:
            record.save(device=setup.device, dtype=setup.dtype)
            if here:
                _answer_here(setup, for_model, done, say)
            else:
                monitor.start()
                job = AnswerJob(setup, console, record, n_shards=done.n_settled_shards)
                commit_all(Stream(job, Questions(for_model), Watch(monitor)), done.commit)
    return record


def _answer_here(setup: AnswerSetup, questions: list[QuestionRecord], done: CommittedAnswers, say: Say) -> None:
    """Answer questions batch by batch in this process, commit each batch, and print the progress."""
    with usage_errors():
        answerer = Answerer(setup)
    last_line_at = time.monotonic()
    blocks = pack_blocks(group_by_videos(questions, setup.batch_size))
    for number, batch in enumerate(chain.from_iterable(map(answerer, blocks)), done.n_settled_shards):
        done.commit(number, unpack_answers(batch))
        if time.monotonic() - last_line_at > setup.config.log_interval:
            say(f"{done.n_answers} of {len(questions)} questions answered, {done.n_failed} of them failed")
            last_line_at = time.monotonic()


def _choose_device_here(config: GenerateConfig) -> tuple[str, str]:
    """Return the (device, dtype) that this process computes with."""
    with usage_errors():
        runtime = choose_runtime(config.device, config.dtype, config.attn)
    return runtime.device, runtime.dtype_name


def _choose_device_of_cluster(config: GenerateConfig, say: Say) -> tuple[str, str]:
    """Join or start the cluster, and return the (device, dtype). Raise UsageError if it lacks the resources."""
    device, dtype = choose_device(config, config.dtype, say)
    if device == "cuda" and _sum_for_models(config, {})["GPU"] < config.tensor_parallel:
        raise UsageError(f"--tensor-parallel {config.tensor_parallel}: no node of the cluster has so many GPUs")
    return device, dtype


def _write_header(request: AnswerRequest, identity: AnswersIdentity) -> None:
    """Write the header of the answers; earlier runs' prunings stay in it while there are answers."""
    store = request.store
    if PRUNINGS in identity and list_shards(store)[0]:
        earlier = read_answers_header(store)["identity"].get(PRUNINGS, {})
        identity = {**identity, PRUNINGS: {**earlier, **identity[PRUNINGS]}}
    write_answers_header(store, identity)


class CommittedAnswers:
    """The commits of a run, and their counts.

    Attributes:
        n_settled_shards: shards of rows that needed no model; the shards of answers are numbered from there.
        n_failed: failed rows of this run.
    """

    def __init__(self, request: AnswerRequest, record: RunFile, monitor: Monitor, say: Say) -> None:
        self._request, self._record, self._monitor, self._say = request, record, monitor, say
        self._keys: set[tuple[str, str | None]] = set()
        self._runtimes: list[str] = []
        self.n_settled_shards = self.n_failed = 0

    @property
    def n_answers(self) -> int:
        """The number of questions that a model has answered, or failed to answer."""
        return len(self._keys)

    def commit_settled(self, rows: Sequence[AnswerRecord]) -> None:
        """Commit the rows that need no model."""
        size = self._request.config.questions_per_shard
        for start in range(0, len(rows), size):
            self._write(self.n_settled_shards, rows[start : start + size])
            self.n_settled_shards += 1
        self.n_failed += sum(row["status"] == "failed" for row in rows)

    def commit(self, number: int, rows: pa.Table) -> None:
        """Commit ``rows`` (ANSWERED_SCHEMA) as shard ``number``, count them, and record new runtimes of workers.

        Rows that come again after an interrupt are counted once. Merges small files after every MAX_WAITING_FILES
        shards.
        """
        if new := [text for text in pc.unique(rows["runtime"]).to_pylist() if text not in self._runtimes]:
            self._runtimes.extend(new)
            self._record.save(runtimes=[json.loads(text) for text in self._runtimes])
        answers = [without_nulls(row, AnswerRecord) for row in rows.drop_columns(["runtime"]).to_pylist()]
        self._write(number, answers)
        uncounted = [row for row in answers if answer_key(row) not in self._keys]
        self._keys.update(map(answer_key, uncounted))
        n_failed = sum(row["status"] == "failed" for row in uncounted)
        self.n_failed += n_failed
        self._monitor.count_rows(ANSWERING.item, len(uncounted) - n_failed, n_failed)
        if (number + 1) % MAX_WAITING_FILES == 0:
            try_merge_answers(self._request.store, MAX_WAITING_FILES, self._say)

    def _write(self, number: int, rows: Sequence[AnswerRecord]) -> None:
        """Write rows as shard ``number``."""
        request = self._request
        commit_answers(request.store, request.run_id, number, rows, request.config.format, request.questions)


@dataclass(frozen=True)
class Questions:
    """The questions of a stream."""

    KEY: ClassVar[Sequence[str]] = KEYS
    rows: Sequence[QuestionRecord]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_complete(self) -> bool:
        """True: no more questions come."""
        return True

    def without(self, rows: pa.Table) -> Questions:
        """Return the questions that have no row among ``rows``."""
        keys = set(zip(*(rows[name].to_pylist() for name in self.KEY), strict=True))
        return Questions([question for question in self.rows if answer_key(question) not in keys])


@dataclass(frozen=True)
class AnswerPlan(Plan):
    """The resources that a graph of answering reserves."""

    wording: ClassVar[Wording] = ANSWERING

    answer: Stage
    questions_per_block: int

    @property
    def workers(self) -> str:
        """A description of the workers that start."""
        return f"{self.answer.workers} to answer, which load the model first"


def plan_answers(cpus: float, gpus: float, n_questions: int, config: GenerateConfig) -> AnswerPlan:
    """Divide the cluster's CPUs and GPUs among language models; ``gpus`` is 0 where models run on CPUs.

    There are never more models than questions, and at least one. On CPUs it is one unless ``workers`` says more.
    """
    gpus_per_model = config.tensor_parallel
    max_workers = max(1, int(gpus) // gpus_per_model) if gpus >= 1 else max(1, int(cpus))
    workers = max(1, min(config.workers or (max_workers if gpus >= 1 else 1), max_workers, n_questions))
    # A block is the unit of work, of retry and of a commit. Small runs use small blocks, but of whole batches, and no
    # more blocks than the driver tracks lightly.
    batch = min(choose_batch_size(config), max(1, n_questions // workers))
    batches = min(config.questions_per_shard, n_questions // (8 * workers)) // batch
    block = batch * max(1, batches)
    return AnswerPlan(
        answer=Stage(
            0, gpus_per_model, workers, "one model a GPU, or several of a node; a CPU for its host thread is left"
        )
        if gpus >= 1
        else Stage(min(1.0, cpus), 0, workers, "for trying things out: a CPU answers slowly"),
        questions_per_block=max(block, n_questions // MAX_BLOCKS),
    )


class AnswerJob(Job[Questions]):
    """The work of a run on Ray: language models that answer blocks of questions."""

    wording = ANSWERING
    options: GenerateConfig

    def __init__(self, setup: AnswerSetup, console: Console, record: RunFile, n_shards: int = 0) -> None:
        """Set up the work; nothing is planned yet.

        Args:
            setup: the settings of the workers, with a device.
            record: gets each plan.
            n_shards: shards that the run has written already.
        """
        super().__init__(setup.config, console)
        self._setup, self._record, self.n_shards = setup, record, n_shards

    def plan(self, items: Questions) -> AnswerPlan:
        """Divide the cluster among language models, and record the plan.

        Raises RunFailed if the nodes that it needs were lost. Prints a note if ``workers`` do not fit.
        """
        cluster, workers = self.available_resources(), self.options.workers
        if not self.can_run_on(cluster):
            raise RunFailed("the nodes that the run needs were lost. Rerun the command once they are back")
        plan = self.replan(len(items))
        if workers is not None and plan.answer.workers < min(workers, len(items)):
            self.say(f"note: the cluster fits only {plan.answer.workers} of --workers {workers}")
        self._record.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def replan(self, n_items: int) -> AnswerPlan:
        """Plan ``n_items`` on the current nodes."""
        cluster, on_gpus = self.available_resources(), self._setup.device == "cuda"
        return plan_answers(cluster["CPU"], cluster["GPU"] if on_gpus else 0.0, n_items, self.options)

    def graph(self, items: Questions, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        """Build the graph that answers the questions; its rows are ANSWERED_SCHEMA."""
        assert isinstance(plan, AnswerPlan)
        size, selector = plan.questions_per_block, node_selector(self.excluded_nodes)
        blocks = ray.data.from_blocks(pack_blocks(group_by_videos(items.rows, size)))
        answers = add_stage(blocks, Answerer, plan.answer, (self._setup, heartbeats), selector)
        return RunGraph(answers, size, unpack_block=unpack_answers)

    def available_resources(self) -> dict[str, float]:
        """Return the resources of the nodes that the run may use now."""
        return _sum_for_models(self.options, self.excluded_nodes)

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        """Return True if a cluster with these resources can run a model."""
        n_gpus = self.options.tensor_parallel if self._setup.device == "cuda" else 0
        return super().can_run_on(cluster) and cluster.get("GPU", 0.0) >= n_gpus


def _sum_for_models(config: GenerateConfig, excluded_nodes: Mapping[str, str]) -> dict[str, float]:
    """Return the nodes' resources, with at most ``max_gpus`` GPUs, of nodes that have enough for a whole model."""
    cluster, per_model = sum_resources(excluded_nodes), config.tensor_parallel
    gpus = cluster.get("GPU", 0.0)
    if per_model > 1:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in excluded_nodes]
        gpus = sum(per_model * (node["Resources"].get("GPU", 0.0) // per_model) for node in nodes)
    return cap_gpus({**cluster, "GPU": gpus}, config.max_gpus)


def answer_questions(
    cache: TokenCache | str | os.PathLike[str],
    questions: object = None,
    *,
    out: str | os.PathLike[str] = "answers",
    progress: ProgressOption = True,
    **options: Any,
) -> AnswerSummary:
    """Answer questions about cached videos with the cache's language model, on Ray.

    >>> asked = [{"question_id": 1, "video_id": "bikes.mp4", "prompt": "What happens here?"}]
    >>> summary = pipeline.answer_questions("my-cache", asked, out="answers", retention_ratio=0.10)
    >>> pipeline.read_answers(summary.out).select(["question_id", "answer"]).to_pylist()

    The call is resumable: call it again to ask the questions without an answer. Ray, loggers and settings are left as
    they were, as in :func:`pipeline.prune_videos`.

    Args:
        cache: a path, or a TokenCache, which is opened again.
        questions: a file as for ``python -m jobs.generate --questions``; or rows with question_id, video_id, prompt and
            optional choices, answer, system and options of decoding: dicts, or a table of Arrow, pandas or Polars. None
            with ``ask=["What happens here?"]``, which asks every video of the cache.
        out: the answers to create or to continue.
        progress: as of ``prune_videos``.
        options: the options of ``python -m jobs.generate --help-all`` by name, ``--max-new-tokens 8`` as
            ``max_new_tokens=8``.

    Returns the counts of these questions in ``out``; ``failed`` has question_id -> class of the error.

    Raises UsageError, RunFailed and TooManyFailed as ``prune_videos``, and CorruptShard for a damaged cache.
    """
    place = str(cache.store) if isinstance(cache, TokenCache) else cache
    is_file = questions is None or isinstance(questions, str | os.PathLike)
    source = questions if is_file else "questions from Python"
    config = make_config(
        GenerateConfig, "answer_questions", {"cache": place, "questions": source, "out": out, **options}
    )
    console = make_console(progress)
    with run_here():
        table = None if is_file else read_given_questions(questions, AnswerMode.of(config), config.limit)
        summary = answer(config, console, table)
    return check_outcome(summary, config, summary.n_questions)
