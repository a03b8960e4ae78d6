"""One run that answers questions from cached tokens, on the driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import ray
from rich.console import Console

from pipeline.cache.merging import WAITING, WAITING_AT_END
from pipeline.errors import RunFailed, UsageError
from pipeline.execution.cluster import at_most, choose_device, provenance
from pipeline.execution.monitoring.monitor import Monitor
from pipeline.execution.run import Run, Streamed
from pipeline.execution.run_record import RunFile
from pipeline.execution.stream import PlannedGraph, stream
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
from pipeline.generate.graph import AnswerPlan, batch_size, build_graph, plan_answers
from pipeline.generate.request import GenerateRequest, match_answers, prepare
from pipeline.generate.resume import asked_rows, notes_on_answered, split_decided, unanswered
from pipeline.generate.summary import AnswerSummary, summarise_answers
from pipeline.rows import AnswerRecord, JsonObject, QuestionRecord, without_nulls

_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow")


def answer_questions(config: GenerateConfig, console: Console) -> AnswerSummary:
    """Bring the answers ``config.out`` up to date with ``config.questions``.

    Raises UsageError (nothing was started) or RunFailed (what was committed stays; a rerun goes on).
    """
    return AnswerRun(config, console).carry_out()


class Computed(NamedTuple):
    """The device and dtype that answers are computed with."""

    device: str
    dtype: str


@dataclass(frozen=True)
class Todo:
    """The questions that are left to ask, and the table of existing answers."""

    questions: list[QuestionRecord]
    table: AnswersTable

    def __len__(self) -> int:
        return len(self.questions)


class AnswerRun(Run[GenerateConfig, GenerateRequest, Todo, AnswerSummary]):
    """The run that answers questions: one stage on actors, commits by the driver (``pipeline.generate.graph``).

    ``make`` gives the request; by default the options do.
    """

    def __init__(
        self, config: GenerateConfig, console: Console, make: Callable[[], GenerateRequest] | None = None
    ) -> None:
        super().__init__(config, console)
        self._make = make or partial(prepare, config, console)

    def prepare(self) -> GenerateRequest:
        return self._make()

    def match(self, request: GenerateRequest) -> GenerateRequest:
        match_answers(request)
        return request

    def remaining(self, request: GenerateRequest) -> Todo:
        table = AnswersTable(request.store)
        live = table.live()
        questions = unanswered(request, live)
        for line in notes_on_answered(request, live, questions):
            self.console.print(line, highlight=False)
        return Todo(questions, table)

    def stream(self, request: GenerateRequest, todo: Todo) -> Streamed:
        """Commit the error rows that the cache alone decides, then stream the rest; Ray starts only if any are left."""
        config, size = self.options, self.options.questions_per_shard
        ask, decided = split_decided(request, todo.questions)
        # Before any row is written: the cluster may not be able to do what the flags ask.
        computed = self._computed() if ask else None
        write_answers_header(request.store, self._identity(request, todo))
        about: JsonObject = {"config": config.as_record(), "questions": len(todo)}
        run_file = RunFile(request.store, {**provenance(request.run_id, _RECORDED_VERSIONS), **about})
        n_failed = len(decided)
        with run_file:
            starts = range(0, len(decided), size)
            for number, start in enumerate(starts):
                part = decided[start : start + size]
                commit_answers(request.store, request.run_id, number, part, config.format)
            if computed is not None:
                run_file.save(**computed._asdict())
                n_failed += self._answered(request, ask, len(starts), computed, run_file)
        return Streamed(run_file, n_failed)

    def tidy(self, request: GenerateRequest, todo: Todo) -> None:
        try_merge_answers(request.store, WAITING_AT_END, self.say)

    @staticmethod
    def _identity(request: GenerateRequest, todo: Todo) -> AnswersIdentity:
        """Return the answers' identity; prunings of earlier runs stay in it while they have answers."""
        identity = request.identity
        if PRUNINGS not in identity or not todo.table.names():
            return identity
        held = read_answers_header(request.store)["identity"].get(PRUNINGS, {})
        return {**identity, PRUNINGS: {**held, **identity[PRUNINGS]}}

    def summarise(self, request: GenerateRequest, todo: Todo, n_failed: int, wall_s: float) -> AnswerSummary:
        new = {answer_key(question) for question in todo.questions}
        total = len(request.questions) * len(request.prunings)
        live = asked_rows(todo.table.live(), request.questions, request.prunings)
        summary = summarise_answers(live, total, new, wall_s)
        return replace(summary, out=str(request.store))

    def _computed(self) -> Computed:
        """Join or start the cluster, and return the device and dtype.

        Raises UsageError where the flags cannot be met.
        """
        computed = Computed(*choose_device(self.options, self.options.dtype, self.say))
        wanted = self.options.tensor_parallel
        if computed.device == "cuda" and self._available_resources()["GPU"] < wanted:
            raise UsageError(f"--tensor-parallel {wanted}: no node of the cluster has so many GPUs")
        return computed

    def _answered(
        self,
        request: GenerateRequest,
        ask: list[QuestionRecord],
        n_shards: int,
        computed: Computed,
        run_file: RunFile,
    ) -> int:
        """Answer ``ask`` on the cluster; return the number of failed questions.

        ``n_shards`` shards of the run exist already, and their numbers are not used again.
        """
        config = self.options
        self.monitor.start()
        commits = Commits(request, n_shards, run_file, self.say, self.monitor)

        def planned(ask: list[QuestionRecord]) -> PlannedGraph:
            plan = self._planned(len(ask), computed.device, run_file)
            build = partial(build_graph, ask, answer_setup(request, *computed), plan)
            return PlannedGraph(
                build,
                partial(commits, commits.n_shards),
                plan,
                partial(len, ask),
                available_resources=self._available_resources,
                on_look=self.monitor.look,
                again=partial(self._plan, computed.device),
            )

        def left(ask: list[QuestionRecord]) -> list[QuestionRecord]:
            return [question for question in ask if answer_key(question) not in commits.answered]

        return stream(ask, planned, left, self.console, config)

    def _available_resources(self) -> dict[str, float]:
        """Return the cluster's resources, counting only GPUs of nodes that have enough for a whole model."""
        cluster, each = dict(ray.cluster_resources()), self.options.tensor_parallel
        gpus = (node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"])
        whole = cluster.get("GPU", 0.0) if each == 1 else sum(each * (gpu // each) for gpu in gpus)
        return at_most({**cluster, "GPU": whole}, self.options.max_gpus)

    def _planned(self, n_questions: int, device: str, run_file: RunFile) -> AnswerPlan:
        """Plan the workers for the cluster as it is now."""
        cluster, config = self._available_resources(), self.options
        if cluster.get("CPU", 0.0) <= 0 or (device == "cuda" and cluster.get("GPU", 0.0) < config.tensor_parallel):
            raise RunFailed("the nodes that the run needs are gone; run the same command again once they are back")
        plan = self._plan(device, n_questions)
        if config.workers is not None and plan.answer.workers < min(config.workers, n_questions):
            room = f"the cluster has room for {plan.answer.workers} of --workers {config.workers}"
            self.console.print(f"note: {room}", highlight=False)
        run_file.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def _plan(self, device: str, n_questions: int) -> AnswerPlan:
        """Plan the workers for so many questions on the cluster as it is now."""
        cluster = self._available_resources()
        gpus = cluster["GPU"] if device == "cuda" else 0.0
        return plan_answers(cluster["CPU"], gpus, n_questions, self.options)


class Commits:
    """The committer of answers: writes shards as they come, and records what computed them.

    Attributes:
        answered: what was committed, as ``answer_key`` has it.
        n_failed: how many of these failed.
        n_shards: how many numbers of shards are taken.
    """

    def __init__(
        self,
        request: GenerateRequest,
        n_shards: int,
        run_file: RunFile,
        say: Callable[[str], object],
        monitor: Monitor | None = None,
    ) -> None:
        self._request, self._run_file, self._say, self._monitor = request, run_file, say, monitor
        self.n_shards = n_shards
        self._runtimes: list[str] = []
        self.answered: set[tuple[str, str | None]] = set()
        self.n_failed = 0

    def __call__(self, before: int, number: int, rows: pa.Table) -> None:
        """Commit ``rows`` (ANSWERED) as shard ``before + number``; ``before`` counts the shards of earlier graphs."""
        # What computed the answers, as the nodes themselves say.
        if new := [text for text in pc.unique(rows["runtime"]).to_pylist() if text not in self._runtimes]:
            self._runtimes.extend(new)
            self._run_file.save(runtimes=[json.loads(text) for text in self._runtimes])
        answers = [without_nulls(row, AnswerRecord) for row in rows.drop_columns(["runtime"]).to_pylist()]
        request = self._request
        place = before + number
        commit_answers(request.store, request.run_id, place, answers, request.config.format)
        self.n_shards = max(self.n_shards, place + 1)
        self.answered.update(map(answer_key, answers))
        n_failed = sum(answer["status"] != "ok" for answer in answers)
        self.n_failed += n_failed
        if self._monitor is not None:
            self._monitor.committed("question", len(answers) - n_failed, n_failed)
        if self.n_shards % WAITING == 0:
            try_merge_answers(request.store, WAITING, self._say)


def answer_setup(request: GenerateRequest, device: str, dtype: str) -> AnswerSetup:
    """Return the settings that answering workers need, on the chosen device and dtype."""
    return AnswerSetup(
        source=request.source,
        store=request.cache,
        live=request.live,
        retention_ratio=request.read_ratio,
        prunings=request.prunings,
        order=request.order,
        own_order=request.own_order,
        positions=request.builder.policy.positions,
        rule=request.builder.policy.rule,
        frame_times=request.builder.policy.frame_times,
        engine=request.engine_setup(),
        batch_size=batch_size(request.config),
        device=device,
        dtype=dtype,
        attn=request.config.attn,
    )
