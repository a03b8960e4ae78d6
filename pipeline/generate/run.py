"""One run of answering: questions -> answer (GPU actors: cached tokens -> prompt -> language model) -> commits.

The run checks everything first, then streams questions through the answering stage, and commits each shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.actor import ActorHandle
from rich.console import Console

from pipeline.cache.merging import WAITING, WAITING_AT_END
from pipeline.errors import RunFailed, UsageError
from pipeline.generate.answer_stage import STAGE, Answerer, answered_rows, question_blocks
from pipeline.generate.answers import (
    PRUNINGS,
    AnswersIdentity,
    AnswersTable,
    answer_key,
    commit_answers,
    read_answers_header,
    try_merge_answers,
    write_answers_header,
)
from pipeline.generate.asking import AnswerSetup
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import BATCH_SIZES
from pipeline.generate.request import GenerateRequest, match_answers, prepare
from pipeline.generate.resume import asked_rows, in_blocks, notes_on_answered, split_decided, unanswered
from pipeline.generate.summary import AnswerSummary, summarise_answers
from pipeline.rows import AnswerRecord, JsonObject, QuestionRecord, without_nulls
from pipeline.runner.cluster import at_most, choose_device, provenance
from pipeline.runner.driver import Driver
from pipeline.runner.run_record import RunFile
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import MAX_BLOCKS, Plan, Stage, StageWords, Wording, add_stage

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
    """Divide the cluster's CPUs and GPUs among language models; ``gpus`` is 0 where models run on CPUs."""
    each = config.tensor_parallel
    room = max(1, int(gpus) // each) if gpus >= 1 else max(1, int(cpus))
    workers = max(1, min(config.workers or (room if gpus >= 1 else 1), room, n_questions))
    # A block is the unit of work, of retry and of what is committed at once: small runs use small ones, but whole
    # batches, and no more of them than the driver tracks lightly.
    batch = min(batch_size(config), max(1, n_questions // workers))
    batches = min(config.questions_per_shard, n_questions // (8 * workers)) // batch
    block = batch * max(1, batches)
    return AnswerPlan(
        answer=Stage(0, each, workers, "one model a GPU, or several of a node; a CPU for its host thread is left")
        if gpus >= 1
        else Stage(min(1.0, cpus), 0, workers, "for trying things out: a CPU answers slowly"),
        questions_per_block=max(block, n_questions // MAX_BLOCKS),
    )


def batch_size(config: GenerateConfig) -> int:
    """Return the number of questions that a model is given at once: the option, or the engine's default."""
    return config.batch_size or BATCH_SIZES[config.engine]


def build_graph(
    ask: Sequence[QuestionRecord], setup: AnswerSetup, plan: AnswerPlan, heartbeats: ActorHandle | None = None
) -> RunGraph:
    """Build the Ray Data graph that answers ``ask``; nothing runs until its parts are asked for."""
    # A block is one row: its questions share videos, which are read once and go through the model once.
    blocks = question_blocks(in_blocks(ask, plan.questions_per_block))
    answers = add_stage(ray.data.from_blocks(blocks), Answerer, plan.answer, (setup, heartbeats))
    return RunGraph(answers, plan.questions_per_block, rows=answered_rows)


class AnswerRun(Driver[GenerateConfig, list[QuestionRecord], AnswerSummary]):
    """The run that answers questions: it brings the answers ``config.out`` up to date with ``config.questions``.

    ``make`` gives the request; by default the options do.

    Attributes:
        device, dtype: of the language models, once a question needs one.
        answered: what was committed, as ``answer_key`` has it.
        n_failed: questions of this run that failed.
    """

    device = dtype = ""

    def __init__(
        self, config: GenerateConfig, console: Console, make: Callable[[], GenerateRequest] | None = None
    ) -> None:
        super().__init__(config, console)
        self._make = make or partial(prepare, config, console)
        self.answered: set[tuple[str, str | None]] = set()
        self.n_failed = 0
        self._runtimes: list[str] = []

    def prepare(self) -> None:
        self.request = self._make()
        self.store, self.run_id = self.request.store, self.request.run_id

    def match(self) -> None:
        match_answers(self.request)

    def remaining(self) -> list[QuestionRecord]:
        self.table = AnswersTable(self.store)
        live = self.table.live()
        questions = unanswered(self.request, live)
        for line in notes_on_answered(self.request, live, questions):
            self.say(line)
        return questions

    def process(self, todo: list[QuestionRecord]) -> None:
        """Commit the error rows that the cache alone decides, then answer the rest; Ray starts only if any are left."""
        config = self.options
        ask, decided = split_decided(self.request, todo)
        if ask:  # before any row is written: the cluster may not be able to do what the flags ask
            self.device, self.dtype = self.choose_device()
        write_answers_header(self.store, self._identity())
        about: JsonObject = {"config": config.as_record(), "questions": len(todo)}
        self.run_file = RunFile(self.store, {**provenance(self.run_id, _RECORDED_VERSIONS), **about})
        with self.run_file:
            for start in range(0, len(decided), config.questions_per_shard):
                part = decided[start : start + config.questions_per_shard]
                commit_answers(self.store, self.run_id, self.n_shards, part, config.format)
                self.n_shards += 1
            self.n_failed += len(decided)
            if ask:
                self.run_file.save(device=self.device, dtype=self.dtype)
                self.answer(ask)

    def choose_device(self) -> tuple[str, str]:
        """Join or start the cluster, and choose (device, dtype). Raise UsageError where the flags cannot be met."""
        device, dtype = choose_device(self.options, self.options.dtype, self.say)
        wanted = self.options.tensor_parallel
        if device == "cuda" and self.available_resources()["GPU"] < wanted:
            raise UsageError(f"--tensor-parallel {wanted}: no node of the cluster has so many GPUs")
        return device, dtype

    def answer(self, ask: list[QuestionRecord]) -> None:
        """Answer questions on the cluster. Raises RunFailed."""
        self.monitor.start()
        self.stream(ask)

    def _identity(self) -> AnswersIdentity:
        """Return the answers' identity; prunings of earlier runs stay in it while they have answers."""
        identity = self.request.identity
        if PRUNINGS not in identity or not self.table.names():
            return identity
        held = read_answers_header(self.store)["identity"].get(PRUNINGS, {})
        return {**identity, PRUNINGS: {**held, **identity[PRUNINGS]}}

    def plan(self, items: list[QuestionRecord]) -> AnswerPlan:
        cluster, config = self.available_resources(), self.options
        if cluster.get("CPU", 0.0) <= 0 or (self.device == "cuda" and cluster.get("GPU", 0.0) < config.tensor_parallel):
            raise RunFailed("the nodes that the run needs are gone; run the same command again once they are back")
        plan = self.plan_again(len(items))
        if config.workers is not None and plan.answer.workers < min(config.workers, len(items)):
            self.say(f"note: the cluster has room for {plan.answer.workers} of --workers {config.workers}")
        self.run_file.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def plan_again(self, n_items: int) -> AnswerPlan:
        cluster = self.available_resources()
        return plan_answers(cluster["CPU"], cluster["GPU"] if self.device == "cuda" else 0.0, n_items, self.options)

    def available_resources(self) -> dict[str, float]:
        """Return the cluster's resources, counting only GPUs of nodes that have enough for a whole model."""
        cluster, each = dict(ray.cluster_resources()), self.options.tensor_parallel
        gpus = (node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"])
        whole = cluster.get("GPU", 0.0) if each == 1 else sum(each * (gpu // each) for gpu in gpus)
        return at_most({**cluster, "GPU": whole}, self.options.max_gpus)

    def build(self, items: list[QuestionRecord], plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        assert isinstance(plan, AnswerPlan)
        return build_graph(items, answer_setup(self.request, self.device, self.dtype), plan, heartbeats)

    def commit(self, number: int, rows: pa.Table) -> None:
        """Commit ``rows`` (ANSWERED), and record what computed them."""
        # What computed the answers, as the nodes themselves say.
        if new := [text for text in pc.unique(rows["runtime"]).to_pylist() if text not in self._runtimes]:
            self._runtimes.extend(new)
            self.run_file.save(runtimes=[json.loads(text) for text in self._runtimes])
        answers = [without_nulls(row, AnswerRecord) for row in rows.drop_columns(["runtime"]).to_pylist()]
        commit_answers(self.store, self.run_id, number, answers, self.options.format)
        self.answered.update(map(answer_key, answers))
        n_failed = sum(answer["status"] != "ok" for answer in answers)
        self.n_failed += n_failed
        self.monitor.committed("question", len(answers) - n_failed, n_failed)
        if (number + 1) % WAITING == 0:
            try_merge_answers(self.store, WAITING, self.say)

    def unfinished(self, items: list[QuestionRecord]) -> list[QuestionRecord]:
        return [question for question in items if answer_key(question) not in self.answered]

    def summarise(self, todo: list[QuestionRecord], wall_s: float) -> AnswerSummary:
        request, new = self.request, {answer_key(question) for question in todo}
        live = asked_rows(self.table.live(), request.questions, request.prunings)
        n_questions = len(request.questions) * len(request.prunings)
        return replace(summarise_answers(live, n_questions, new, wall_s), out=str(self.store))

    def tidy(self) -> None:
        try_merge_answers(self.store, WAITING_AT_END, self.say)


def answer_setup(request: GenerateRequest, device: str, dtype: str) -> AnswerSetup:
    """Return the settings that answering workers need, on the chosen device and dtype."""
    policy = request.builder.policy
    return AnswerSetup(
        source=request.source,
        store=request.cache,
        live=request.live,
        retention_ratio=request.read_ratio,
        prunings=request.prunings,
        order=request.order,
        own_order=request.own_order,
        positions=policy.positions,
        rule=policy.rule,
        frame_times=policy.frame_times,
        engine=request.engine_setup(),
        batch_size=batch_size(request.config),
        device=device,
        dtype=dtype,
        attn=request.config.attn,
    )
