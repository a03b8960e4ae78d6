"""The Ray job of a run that answers questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from rich.console import Console

from pipeline.console import Say
from pipeline.errors import UsageError
from pipeline.generate.answer_setup import AnswerSetup
from pipeline.generate.answerer import STAGE, Answerer, group_by_videos, pack_blocks, unpack_answers
from pipeline.generate.answers import KEYS, make_answer_key
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import choose_batch_size
from pipeline.rows import QuestionRecord
from pipeline.runner.cluster.connection import cap_gpus, choose_device, make_node_selector, sum_resources
from pipeline.runner.job import Job
from pipeline.runner.run_record import RunFile
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import MAX_BLOCKS, Plan, Stage, StageWords, Wording, add_stage

ANSWERING = Wording(
    doing="answering",
    item="question",
    stages={STAGE: StageWords("asked", "look at that host, its GPU, and the storage of the cache")},
    to_lower="--workers",
)


@dataclass(frozen=True)
class Questions:
    """The questions that a run asks the model."""

    KEY: ClassVar[Sequence[str]] = KEYS
    is_complete: ClassVar[bool] = True

    rows: Sequence[QuestionRecord]

    def __len__(self) -> int:
        return len(self.rows)

    def without(self, rows: pa.Table) -> Questions:
        """Return the questions without those whose (question_id, pruning) is in ``rows``."""
        keys = set(zip(*(rows[name].to_pylist() for name in self.KEY), strict=True))
        return Questions([question for question in self.rows if make_answer_key(question) not in keys])


@dataclass(frozen=True)
class AnswerPlan(Plan):
    """The resources that the language models reserve, and the size of their blocks."""

    wording: ClassVar[Wording] = ANSWERING

    answer: Stage
    questions_per_block: int

    @property
    def workers(self) -> str:
        """A description of the workers that start."""
        return f"{self.answer.workers} to answer, which load the model first"


def plan_answers(cpus: float, gpus: float, n_questions: int, config: GenerateConfig) -> AnswerPlan:
    """Plan how many language models start, what each of them reserves, and how many questions a block has.

    Each model takes ``tensor_parallel`` GPUs, or one CPU. There are at least one and at most as many models as fit and
    as there are questions. By default all GPUs are used, but only one CPU. A block has at least one batch, and
    otherwise whole batches for about an eighth of a model's questions, up to ``questions_per_shard``. Blocks are larger
    if there would be more than MAX_BLOCKS.

    Args:
        gpus: the GPUs of the cluster; 0 if models run on CPUs.
    """
    gpus_per_model = config.tensor_parallel
    max_workers = max(1, int(gpus) // gpus_per_model) if gpus >= 1 else max(1, int(cpus))
    workers = max(1, min(config.workers or (max_workers if gpus >= 1 else 1), max_workers, n_questions))
    # A block is the unit of work, of retries and of commits. Small runs use small blocks (of whole batches, still), and
    # large runs no more blocks than the driver can track with little memory.
    batch = min(choose_batch_size(config), max(1, n_questions // workers))
    batches = min(config.questions_per_shard, n_questions // (8 * workers)) // batch
    block = batch * max(1, batches)
    return AnswerPlan(
        answer=Stage(
            0, gpus_per_model, workers, "a model per GPU or group of GPUs of a node; a CPU is left for its host thread"
        )
        if gpus >= 1
        else Stage(min(1.0, cpus), 0, workers, "for trying things out: a CPU answers slowly"),
        questions_per_block=max(block, n_questions // MAX_BLOCKS),
    )


class AnswerJob(Job[Questions]):
    """The work of a run on Ray: language models that answer blocks of questions."""

    wording = ANSWERING
    options: GenerateConfig

    def __init__(self, setup: AnswerSetup, console: Console, record: RunFile) -> None:
        super().__init__(setup.config, console)
        self._setup = setup
        self._record = record

    def plan(self, items: Questions) -> AnswerPlan:
        """Divide the cluster among language models, and save the plan in the run's record.

        Prints a note if fewer models fit than ``workers`` asks for. Raises RunFailed if no node left can run a model.
        """
        cluster = self.require_resources()
        workers = self.options.workers
        plan = self.replan(len(items))
        if workers is not None and plan.answer.workers < min(workers, len(items)):
            self.say(f"note: the cluster fits only {plan.answer.workers} of --workers {workers}")
        self._record.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def replan(self, n_items: int) -> AnswerPlan:
        """Plan ``n_items`` questions on the current nodes."""
        cluster = self.available_resources()
        on_gpus = self._setup.device == "cuda"
        return plan_answers(cluster["CPU"], cluster["GPU"] if on_gpus else 0.0, n_items, self.options)

    def graph(self, items: Questions, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        """Build the Ray Data graph, on all nodes but ``excluded_nodes``; its rows have ANSWERED_SCHEMA."""
        assert isinstance(plan, AnswerPlan)
        size = plan.questions_per_block
        selector = make_node_selector(self.excluded_nodes)
        blocks = ray.data.from_blocks(pack_blocks(group_by_videos(items.rows, size)))
        answers = add_stage(blocks, Answerer, plan.answer, (self._setup, heartbeats), selector)
        return RunGraph(answers, size, unpack_block=unpack_answers)

    def available_resources(self) -> dict[str, float]:
        """Sum the resources that the run may use now."""
        return sum_model_resources(self.options, self.excluded_nodes)

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        """Return True if these resources include a CPU and, on the device "cuda", the GPUs of a model."""
        n_gpus = self.options.tensor_parallel if self._setup.device == "cuda" else 0
        return super().can_run_on(cluster) and cluster.get("GPU", 0.0) >= n_gpus


def sum_model_resources(config: GenerateConfig, excluded_nodes: Mapping[str, str]) -> dict[str, float]:
    """Add up the resources of the living nodes that are not excluded, with GPUs for whole models only.

    A model cannot span nodes: with ``tensor_parallel`` 4, a node of 6 GPUs counts as 4. GPUs are capped at
    ``max_gpus``.
    """
    cluster = sum_resources(excluded_nodes)
    per_model = config.tensor_parallel
    gpus = cluster.get("GPU", 0.0)
    if per_model > 1:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in excluded_nodes]
        gpus = sum(per_model * (node["Resources"].get("GPU", 0.0) // per_model) for node in nodes)
    return cap_gpus({**cluster, "GPU": gpus}, config.max_gpus)


def choose_device_for_models(config: GenerateConfig, say: Say) -> tuple[str, str]:
    """Join or start the Ray cluster, and choose the (device, dtype) of the models.

    Raises:
        UsageError: the cluster lacks the resources of the flags, or no node has ``tensor_parallel`` GPUs.
        RunFailed: no cluster can be joined or started.
    """
    device, dtype = choose_device(config, config.dtype, say)
    if device == "cuda" and sum_model_resources(config, {})["GPU"] < config.tensor_parallel:
        raise UsageError(f"--tensor-parallel {config.tensor_parallel}: no node of the cluster has that many GPUs")
    return device, dtype
