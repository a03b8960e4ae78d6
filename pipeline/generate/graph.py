"""The stage that answers, and what it may use.

questions -> answer (GPU actors: cached tokens -> prompt -> language model) -> driver commits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ray

from pipeline.execution.shards import RunGraph
from pipeline.execution.stages import MAX_BLOCKS, Plan, Stage, StageWords, Wording, add_stage
from pipeline.generate.answer_stage import STAGE, Answerer, answered_rows, question_blocks
from pipeline.generate.asking import AnswerSetup
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import BATCH_SIZES
from pipeline.generate.resume import in_blocks
from pipeline.rows import QuestionRecord

ANSWERING = Wording(
    doing="answering",
    item="question",
    stages={STAGE: StageWords("asked", "look at that host, its GPU, and the storage of the cache")},
    to_lower="--workers",
)


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
    ask: Sequence[QuestionRecord], setup: AnswerSetup, plan: AnswerPlan, heartbeats: Any = None
) -> RunGraph:
    """Build the Ray Data graph that answers ``ask``; nothing runs until its parts are asked for."""
    # A block is one row: its questions share videos, which are read once and go through the model once.
    blocks = question_blocks(in_blocks(ask, plan.questions_per_block))
    answers = add_stage(ray.data.from_blocks(blocks), Answerer, plan.answer, (setup, heartbeats))
    return RunGraph(answers, plan.questions_per_block, rows=answered_rows)
