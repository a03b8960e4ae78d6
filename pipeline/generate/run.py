"""One run of answering: questions -> answer (GPU actors: cached tokens -> prompt -> language model) -> commits.

``AnswerRun`` checks everything first, then streams questions through the answering stage, and commits each shard.
``python -m jobs.generate`` runs it, and so does ``answer_questions`` from Python.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from rich.console import Console

from pipeline.cache.changed_code import REDO
from pipeline.cache.header import fingerprint, read_header
from pipeline.cache.live import LiveVideos, find_widths, select_ok
from pipeline.cache.merging import MAX_WAITING_AT_END, MAX_WAITING_FILES
from pipeline.cache.reader import MAX_HINTS, TokenCache
from pipeline.errors import RunFailed, UsageError, store_usage_errors, usage_errors
from pipeline.generate.answer_setup import (
    LIVE_COLUMNS,
    AnswerSetup,
    PromptForecast,
    choose_token_order,
    identify_answers,
    make_spec,
    resolve_prunings,
)
from pipeline.generate.answerer import STAGE, Answerer, group_by_videos, pack_blocks, unpack_answers
from pipeline.generate.answers import (
    PRUNINGS,
    AnswersIdentity,
    AnswersTable,
    answer_key,
    check_place,
    commit_answers,
    find_code,
    format_answered,
    format_encoded_again,
    format_new_targets,
    match_answers,
    read_answers_header,
    select_remaining_questions,
    try_merge_answers,
    write_answers_header,
)
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import ENGINES, VLLM, choose_batch_size
from pipeline.generate.late_pruning import PruningSpec
from pipeline.generate.model import check_tokens, find_model, make_prompt_builder, read_tower_hash
from pipeline.generate.questions import (
    QUESTION_SCHEMA,
    AnswerMode,
    find_count_from_1,
    make_questions,
    read_given_questions,
    read_questions,
)
from pipeline.generate.removal import format_removed, read_barred
from pipeline.generate.summary import AnswerSummary, summarise_answers
from pipeline.options import make_config
from pipeline.rows import AnswerRecord, JsonObject, QuestionRecord, without_nulls
from pipeline.runner.cluster import cap_gpus, choose_device, node_selector, provenance, sum_resources
from pipeline.runner.driver import Driver
from pipeline.runner.library import ProgressOption, check_outcome, make_console, run_here
from pipeline.runner.run_record import RunFile, check_out, new_run_id
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import MAX_BLOCKS, Plan, Stage, StageWords, Wording, add_stage
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

ANSWERING = Wording(
    doing="answering",
    item="question",
    stages={STAGE: StageWords("asked", "look at that host, its GPU, and the storage of the cache")},
    to_lower="--workers",
)
_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow")


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


def build_graph(
    questions: Sequence[QuestionRecord],
    setup: AnswerSetup,
    plan: AnswerPlan,
    heartbeats: ActorHandle | None = None,
    *,
    without: Collection[str] = (),
) -> RunGraph:
    """Build the Ray Data graph that answers the questions; it runs once its batches are read.

    Its rows are ANSWERED_SCHEMA. ``without``: the ids of nodes on which no worker may run.
    """
    blocks = pack_blocks(group_by_videos(questions, plan.questions_per_block))
    answers = add_stage(
        ray.data.from_blocks(blocks), Answerer, plan.answer, (setup, heartbeats), node_selector(without)
    )
    return RunGraph(answers, plan.questions_per_block, unpack_block=unpack_answers)


class AnswerRun(Driver[GenerateConfig, list[QuestionRecord], AnswerSummary]):
    """The run that answers questions: it brings the answers ``config.out`` up to date with the questions.

    Attributes:
        questions: QUESTION_SCHEMA and carried columns; ``prepare`` sets it and the next three.
        setup: the settings of the workers.
        identity: the settings that all answers in the output share.
        forecast: the questions that need no model, and the sizes of prompts.
        device, dtype: of the language models, once a question needs a model.
        answered_keys: keys of the committed answers.
        n_failed: questions of this run that failed.
    """

    questions: pa.Table
    setup: AnswerSetup
    identity: AnswersIdentity
    forecast: PromptForecast
    device = dtype = ""

    def __init__(
        self,
        config: GenerateConfig,
        console: Console,
        questions: pa.Table | None = None,
        specs: Mapping[str, PruningSpec | None] | None = None,
        evaluation: AnswersIdentity | None = None,
    ) -> None:
        """Prepare nothing yet.

        Args:
            questions: QUESTION_SCHEMA and carried columns; None reads the file that the options name, or makes those
                of ``--ask``.
            specs: the prunings under which every question is asked, by name; None is the pruning that the options name.
            evaluation: what an evaluation adds to the identity of the answers.
        """
        super().__init__(config, console)
        self._given_questions = questions
        self._specs = {"": make_spec(config)} if specs is None else specs
        self._evaluation = evaluation
        self.answered_keys: set[tuple[str, str | None]] = set()
        self.n_failed = 0
        self._runtimes: list[str] = []

    def prepare(self) -> None:
        """Check the options against questions, cache, model and answers; set the attributes. Starts nothing.

        Prints notes on prompts that are too long, and on a model that reasons first.

        Raises UsageError, CorruptShard.
        """
        config = self.options
        objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
        if self._given_questions is not None:
            self.questions = self._given_questions
        elif config.questions is not None:
            with store_usage_errors():
                self.questions = read_questions(config.questions, AnswerMode.of(config), objects, config.limit)
        cache, self.store = store_at(config.cache, objects), store_at(config.out, objects)
        self.run_id = new_run_id()
        check_out(self.store)
        with store_usage_errors():
            header = read_header(cache)
            videos = LiveVideos.open(cache, fingerprint(header["identity"]))
            if config.ask:
                self.questions = make_questions(config.ask, self._videos_with_tokens(videos), AnswerMode.of(config))
                self.questions = self.questions.slice(0, config.limit)
            video_ids = pc.unique(pc.list_flatten(self.questions["video_ids"])).to_pylist()
            live = videos.rows_of(video_ids, (*LIVE_COLUMNS, "run_id"))
            known_ids = set(live["video_id"].to_pylist())
            unknown = (video_id for video_id in video_ids if video_id not in known_ids)
            near = {video_id: videos.near(video_id) for video_id in islice(unknown, MAX_HINTS)}
            check_place(self.store)
        cache_identity = header["identity"]
        # vLLM takes other weights too, if they come with the vision encoder that made the cache.
        tower = partial(read_tower_hash, cache, header) if config.engine == VLLM else None
        with usage_errors(), store_usage_errors():
            source = find_model(cache, cache_identity["model"], config.model, config.revision, tower, config.family)
            builder = make_prompt_builder(source, config)
        check_tokens(cache, header, find_widths(live), builder)
        self._video_runs = live.select(["video_id", "status", "run_id", "rewritten"])
        live = live.drop_columns(["run_id"])
        if builder.open_tag and builder.policy.thought == "open" and self._evaluation is None:
            self.say(
                f"note: the chat template of {source.name} ends with {builder.open_tag}, so the model reasons first. "
                "Choices are scored, and short answers cut, inside the reasoning. Give --choices generate and "
                "--max-new-tokens of some thousands, or --close-thought"
            )
        prunings = resolve_prunings(config, self._specs, cache_identity, source, builder)
        late = prunings.get("")
        if late is not None and config.retention_ratio not in (None, late.retention_ratio):
            kept = f"{late.retention_ratio:g} of the tokens, not {config.retention_ratio:g}"
            self.say(f"note: --pruner {config.pruner} keeps {kept}")
        order = choose_token_order(config, cache_identity, prunings)
        setup = AnswerSetup(config, source, cache, live, prunings, order)
        self.forecast = PromptForecast(setup, builder, near, read_barred(self.store))
        self.forecast.check_ratio(cache_identity["retention_ratio"])
        self.forecast.check_context(self.questions, self.console)
        self.setup = replace(setup, largest_video=self.forecast.largest_video())
        if config.engine == VLLM:
            with usage_errors():
                ENGINES[VLLM].check_room(config, source, self.setup.largest_video)
        self._requested_identity = identify_answers(self.setup, cache_identity, builder.policy, self._evaluation)
        with store_usage_errors():
            self.match()

    def _videos_with_tokens(self, videos: LiveVideos) -> list[str]:
        """List the ids of the videos that ``--ask`` asks about. Raises UsageError if there are none."""
        ids: list[str] = select_ok(videos.live(("video_id", "status")))["video_id"].to_pylist()
        if not ids:
            raise UsageError(f"--ask: no video in {self.options.cache} has tokens; python -m jobs.prune makes some")
        return ids

    def match(self) -> None:
        """Match the settings with the stored answers: set ``identity``. Raise IdentityMismatch if they differ."""
        redo = self.options.on_changed == REDO
        self.identity, self._changed = match_answers(self.store, self._requested_identity, redo=redo)

    def list_remaining(self) -> list[QuestionRecord]:
        """Return the questions still to ask, under each pruning, and print how many have answers already.

        If the code of a method has changed (``on_changed=redo``), the header gets the new code now. Answers by the old
        code are not live after that. Raises QuestionsChanged.
        """
        self.table = AnswersTable(self.store, self.identity)
        if self._changed:  # from now on rows by other code are not live
            self.say(f"note: a method has other code now: its questions in {self.store} are asked again")
            write_answers_header(self.store, self._merge_identity())
        prunings, cached_videos = self.setup.prunings, self.forecast.cached
        codes = {name: find_code(self.identity, name) for name in prunings}
        live = self.table.select_live_of(self.questions, prunings)
        to_ask = self.questions.select(QUESTION_SCHEMA.names)
        removed = self.forecast.removed
        questions = select_remaining_questions(self.store, live, to_ask, codes, self.options, cached_videos, removed)
        for line in format_answered(live, self.n_questions, questions, self.options):
            self.say(line)
        for line in format_removed(self.store, live, questions, removed):
            self.say(line)
        for line in format_encoded_again(self.store, live, self._video_runs):
            self.say(line)
        if self._evaluation is None:  # an evaluation scores by its own annotations
            for line in format_new_targets(self.store, live, self.questions):
                self.say(line)
            answers = zip(*(self.questions[name].to_pylist() for name in ("target", "choices")), strict=True)
            if reason := find_count_from_1(answers):
                self.say(f"note: {reason}; jobs.evaluate --score refuses these")
        return questions

    @property
    def n_questions(self) -> int:
        """The number of questions times prunings."""
        return len(self.questions) * len(self.setup.prunings)

    def process(self, todo: list[QuestionRecord]) -> None:
        """Commit the rows that need no model, then answer the other questions on Ray, if any.

        Writes the header of the answers first. Joins or starts the cluster only if a question needs a model. Raises
        UsageError before any row is written, RunFailed.
        """
        config = self.options
        for_model, settled_rows = self.forecast.split(todo)
        if for_model:  # before any row is written: the cluster may lack the resources of the flags
            self.device, self.dtype = self.choose_device()
        write_answers_header(self.store, self._merge_identity())
        about: JsonObject = {"config": config.as_record(), "questions": len(todo)}
        self.run_file = RunFile(self.store, {**provenance(self.run_id, _RECORDED_VERSIONS), **about})
        with self.run_file:
            for start in range(0, len(settled_rows), config.questions_per_shard):
                part = settled_rows[start : start + config.questions_per_shard]
                commit_answers(self.store, self.run_id, self.n_shards, part, config.format, self.questions)
                self.n_shards += 1
            self.n_failed += sum(row["status"] == "failed" for row in settled_rows)
            if for_model:
                self.run_file.save(device=self.device, dtype=self.dtype)
                self.answer(for_model)

    def choose_device(self) -> tuple[str, str]:
        """Join or start the cluster, and choose (device, dtype). Raise UsageError if it lacks the resources."""
        device, dtype = choose_device(self.options, self.options.dtype, self.say)
        n_gpus = self.options.tensor_parallel
        if device == "cuda" and self.available_resources()["GPU"] < n_gpus:
            raise UsageError(f"--tensor-parallel {n_gpus}: no node of the cluster has so many GPUs")
        return device, dtype

    def answer(self, questions: list[QuestionRecord]) -> None:
        """Answer questions on the cluster. Raises RunFailed."""
        self.monitor.start()
        self.stream(questions)

    def _merge_identity(self) -> AnswersIdentity:
        """Return the identity for the header: earlier runs' prunings stay in it while there are answers."""
        if PRUNINGS not in self.identity or not self.table.names():
            return self.identity
        earlier = read_answers_header(self.store)["identity"].get(PRUNINGS, {})
        return {**self.identity, PRUNINGS: {**earlier, **self.identity[PRUNINGS]}}

    def plan(self, items: list[QuestionRecord]) -> AnswerPlan:
        """Divide the cluster among language models, and record the plan.

        Raises RunFailed if the nodes that it needs were lost. Prints a note if ``workers`` do not fit.
        """
        cluster, config = self.available_resources(), self.options
        if not self.can_run_on(cluster):
            raise RunFailed("the nodes that the run needs were lost. Rerun the command once they are back")
        plan = self.replan(len(items))
        if config.workers is not None and plan.answer.workers < min(config.workers, len(items)):
            self.say(f"note: the cluster fits only {plan.answer.workers} of --workers {config.workers}")
        self.run_file.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def replan(self, n_items: int) -> AnswerPlan:
        """Plan ``n_items`` on the current nodes."""
        cluster = self.available_resources()
        return plan_answers(cluster["CPU"], cluster["GPU"] if self.device == "cuda" else 0.0, n_items, self.options)

    def available_resources(self) -> dict[str, float]:
        """Return the nodes' resources, with at most ``max_gpus`` GPUs, of nodes that have enough for a whole model."""
        cluster, per_model = sum_resources(self.excluded_nodes), self.options.tensor_parallel
        gpus = cluster.get("GPU", 0.0)
        if per_model > 1:
            nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in self.excluded_nodes]
            of_nodes = (node["Resources"].get("GPU", 0.0) for node in nodes)
            gpus = sum(per_model * (n_gpus // per_model) for n_gpus in of_nodes)
        return cap_gpus({**cluster, "GPU": gpus}, self.options.max_gpus)

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        n_gpus = self.options.tensor_parallel if self.device == "cuda" else 0
        return super().can_run_on(cluster) and cluster.get("GPU", 0.0) >= n_gpus

    def build(self, items: list[QuestionRecord], plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        assert isinstance(plan, AnswerPlan)
        return build_graph(items, self.worker_setup(), plan, heartbeats, without=self.excluded_nodes)

    def worker_setup(self) -> AnswerSetup:
        """Return the settings of the workers, on the chosen device and dtype."""
        return replace(self.setup, device=self.device, dtype=self.dtype)

    def commit(self, number: int, rows: pa.Table) -> None:
        """Commit ``rows`` (ANSWERED_SCHEMA) as shard ``number``, count them, and record new runtimes of workers.

        Merges small files after every MAX_WAITING_FILES shards.
        """
        if new := [text for text in pc.unique(rows["runtime"]).to_pylist() if text not in self._runtimes]:
            self._runtimes.extend(new)
            self.run_file.save(runtimes=[json.loads(text) for text in self._runtimes])
        answers = [without_nulls(row, AnswerRecord) for row in rows.drop_columns(["runtime"]).to_pylist()]
        commit_answers(self.store, self.run_id, number, answers, self.options.format, self.questions)
        # An interrupt may have come after the same rows were counted.
        uncounted = [answer for answer in answers if answer_key(answer) not in self.answered_keys]
        self.answered_keys.update(map(answer_key, uncounted))
        n_failed = sum(answer["status"] == "failed" for answer in uncounted)
        self.n_failed += n_failed
        self.monitor.count_rows("question", len(uncounted) - n_failed, n_failed)
        if (number + 1) % MAX_WAITING_FILES == 0:
            try_merge_answers(self.store, MAX_WAITING_FILES, self.say)

    def select_unfinished(self, items: list[QuestionRecord]) -> list[QuestionRecord]:
        return [question for question in items if answer_key(question) not in self.answered_keys]

    def summarise(self, todo: list[QuestionRecord], wall_s: float) -> AnswerSummary:
        """Count the committed rows of all questions of the request, with the counts of the questions in ``todo``."""
        live = self.table.select_live_of(self.questions, self.setup.prunings)
        new = {answer_key(question) for question in todo}
        return replace(summarise_answers(live, self.n_questions, new, wall_s), out=str(self.store))

    def tidy(self) -> None:
        try_merge_answers(self.store, MAX_WAITING_AT_END, self.say)


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
        summary = AnswerRun(config, console, table).run()
    return check_outcome(summary, config, summary.n_questions)
