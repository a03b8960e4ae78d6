"""One run that answers questions from cached tokens, on the driver: check everything, then stream, then commit.

questions -> answer (GPU actors: cached tokens -> prompt -> language model) -> driver commits
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import ray
import ray.data
from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.execution.cluster import cause, connect, provenance, settle
from pipeline.execution.heartbeat import start_pulse
from pipeline.execution.progress import Words, reporter
from pipeline.execution.run_record import RunFile
from pipeline.execution.stages import MAX_BLOCKS, Stage, actors
from pipeline.execution.stream import stream
from pipeline.execution.watchdog import Watch
from pipeline.generate.answer_stage import STAGE, Answerer, AnswerSetup, question_blocks
from pipeline.generate.answers import AnswersTable, commit_answers, write_answers_header
from pipeline.generate.config import GenerateConfig
from pipeline.generate.request import GenerateJob, match_answers, prepare
from pipeline.generate.resume import in_blocks, said_of_the_rest, unanswered, without_model
from pipeline.generate.summary import AnswerSummary, summarise_answers
from pipeline.rows import Record
from pipeline.storage.lock import Lock, cache_lock

ANSWERING = Words("answering", "question", {STAGE: "asked"})
_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow")
Row = dict[str, Any]
Machines = tuple[dict[str, float], str, str]  # what the cluster has, and the device and dtype to use


@dataclass(frozen=True)
class AnswerPlan:
    """Every resource number of the graph."""

    item: ClassVar[str] = "question"
    remedies: ClassVar[Mapping[str, str]] = {STAGE: "look at that host, its GPU, and the storage of the cache"}
    to_lower: ClassVar[str] = "--workers"

    answer: Stage
    questions_per_block: int

    @property
    def cpus(self) -> float:
        """CPUs that all models reserve at once."""
        return self.answer.num_cpus * self.answer.workers

    @property
    def gpus(self) -> float:
        """GPUs that all models reserve at once."""
        return self.answer.num_gpus * self.answer.workers

    def collected(self, stage: str, waits: bool) -> int:
        """A block of questions is taken as it is."""
        return 1


def plan_answers(cpus: float, gpus: float, n_questions: int, config: GenerateConfig) -> AnswerPlan:
    """Share out a cluster; ``gpus`` is 0 where the model runs on CPUs."""
    room = int(gpus) if gpus >= 1 else max(1, int(cpus))
    workers = max(1, min(config.workers or (room if gpus >= 1 else 1), room, n_questions))
    # A block is the unit of work, of retry and of what is committed at once: small runs use small ones, but whole
    # batches, and no more of them than the driver tracks lightly.
    batches = min(config.questions_per_shard, n_questions // (8 * workers)) // config.batch_size
    block = config.batch_size * max(1, batches)
    return AnswerPlan(
        answer=Stage(0, 1, workers, "one model a GPU; a CPU for its host thread is left free")
        if gpus >= 1
        else Stage(min(1.0, cpus), 0, workers, "for trying things out: a CPU answers slowly"),
        questions_per_block=max(block, n_questions // MAX_BLOCKS),
    )


def answer_questions(config: GenerateConfig, console: Console) -> AnswerSummary:
    """Bring the answers ``config.out`` up to date with ``config.questions``.

    Raises UsageError (nothing was started) or RunFailed (what was committed stays; a rerun goes on).
    """
    try:
        return _answer_questions(config, console)
    except OSError as error:  # the store of the answers failed; a question's own fault never gets here
        raise RunFailed(cause(error)) from error


def _answer_questions(config: GenerateConfig, console: Console) -> AnswerSummary:
    job = prepare(config, console)
    shown = " ".join(f"{name}={value}" for name, value in config.as_record().items() if value not in (None, []))
    console.print(f"configuration: {shown}", style="dim", markup=False, highlight=False, soft_wrap=True)
    job.store.make()
    with cache_lock(job.store, job.run_id, partial(console.print, highlight=False, markup=False)) as lock:
        match_answers(job)  # again: another run may have written the header before the lock was ours
        started = time.monotonic()
        table = AnswersTable(job.store)
        live = table.live()
        todo = unanswered(job, live)
        for line in said_of_the_rest(job, live, todo):
            console.print(line, highlight=False)
        run_file = _carry_out(job, todo, lock, console) if todo else None
        summary = summarise_answers(
            table.live(), job.questions, {row["question_id"] for row in todo}, time.monotonic() - started
        )
        if run_file is not None:
            run_file.save(summary=summary.as_record())
        return summary


def _carry_out(job: GenerateJob, todo: list[Row], lock: Lock, console: Console) -> RunFile:
    """Commit what the index of the cache decides, and stream the rest; Ray starts only where something is left."""
    ask, rows = without_model(job, todo)
    machines = _machines(job) if ask else None
    lock.check()
    if not AnswersTable(job.store).names():
        write_answers_header(job.store, job.identity)
    record = {**provenance(job.run_id, _RECORDED_VERSIONS), "config": job.config.as_record(), "questions": len(todo)}
    run_file = RunFile(job.store, record)
    with run_file:
        size = job.config.questions_per_shard
        for number, start in enumerate(range(0, len(rows), size)):
            commit_answers(job.store, job.run_id, number, rows[start : start + size], job.config.format)
        if machines is not None:
            _stream(job, ask, (len(rows) + size - 1) // size, machines, run_file, lock, console)
    return run_file


def _machines(job: GenerateJob) -> Machines:
    """Joins or starts the cluster. Raises UsageError where it cannot do what the flags ask, so before any row."""
    cluster = connect()
    return cluster, *settle(cluster, job.config.device, job.config.dtype, job.config.attn)


def _stream(
    job: GenerateJob,
    ask: list[Row],
    first: int,
    machines: Machines,
    run_file: RunFile,
    lock: Lock,
    console: Console,
) -> None:
    """Answer ``ask`` on the cluster; its shards are numbered from ``first``."""
    cluster, device, dtype = machines
    plan = plan_answers(cluster["CPU"], cluster.get("GPU", 0.0) if device == "cuda" else 0.0, len(ask), job.config)
    if job.config.workers is not None and plan.answer.workers < min(job.config.workers, len(ask)):
        console.print(
            f"note: the cluster has room for {plan.answer.workers} of --workers {job.config.workers}", highlight=False
        )
    run_file.save(resources={"cluster": cluster, "plan": asdict(plan)}, device=device, dtype=dtype)
    pulse = start_pulse((STAGE,))
    runtimes: list[Row] = []

    def commit(number: int, rows: list[Record]) -> None:
        for row in rows:
            runtime = row.pop("runtime")
            if runtime not in runtimes:  # what computed the answers, as the nodes themselves say
                runtimes.append(runtime)
                run_file.save(runtimes=runtimes)
        commit_answers(job.store, job.run_id, first + number, rows, job.config.format)

    watch = partial(Watch, pulse, job.config.stall_timeout, plan, len(ask))
    bar = reporter(console, len(ask), job.config.log_interval, ANSWERING)
    dataset = build_graph(ask, answer_setup(job, device, dtype), plan, pulse)
    stream(dataset, commit, len(ask), "question", lock, watch, bar)


def answer_setup(job: GenerateJob, device: str, dtype: str) -> AnswerSetup:
    return AnswerSetup(
        source=job.source,
        store=job.cache,
        live=job.live,
        retention_ratio=job.read_ratio,
        late=job.late,
        order=job.order,
        positions=job.builder.policy.positions,
        rule=job.builder.policy.rule,
        batch_size=job.config.batch_size,
        device=device,
        dtype=dtype,
        attn=job.config.attn,
    )


def build_graph(ask: list[Row], setup: AnswerSetup, plan: AnswerPlan, pulse: Any = None) -> ray.data.Dataset:
    """The lazy dataset whose rows are the answers to ``ask``; nothing runs until it is iterated."""
    # A block is one row: its questions share videos, which are read once and go through the model once.
    blocks = question_blocks(in_blocks(ask, plan.questions_per_block))
    return ray.data.from_blocks(blocks).map_batches(
        Answerer, fn_constructor_args=(setup, pulse), **actors(plan.answer, 1)
    )
