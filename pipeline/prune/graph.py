"""The graph of a prune run: the plan of its workers, and its stages in order. Read this file first.

    manifest -> decode (CPU actors, killable child processes) -> encode + prune (GPU actors)
        -> the driver collects references, by number or age -> write (actors) -> the driver commits

Terms, small to large. Item: one video, with its record and arrays. Batch (BATCH_SCHEMA): the videos of one Arrow row
between two stages: several together, or a very large video alone. Task (TASK_SCHEMA): the videos that one decode call
takes, and that a retry decodes again, in whole batches. ``Part``: the tasks of one archive, or of all videos known at
the start. Shard: the videos of one token file. A block of Ray Data is one row here.

Encode and prune share an actor, so that a video's full tokens (45 MB for 32 frames of LLaVA-OneVision-7B) never cross
the object store. An encoded video waits at most --flush-seconds to be written (``pipeline.runner.shards``).
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.prune.batches import pack_task
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import Decoder, DecodeSetup
from pipeline.prune.encode_stage import Encoder, EncodeSetup
from pipeline.prune.facts import Facts
from pipeline.prune.recipe import PruneStages
from pipeline.prune.request import Request
from pipeline.prune.resources import CALLS, PRUNING, Resources, count_file_bytes, list_shortfalls, plan_workers
from pipeline.prune.todo import Todo
from pipeline.prune.write_stage import Writer
from pipeline.runner.cluster.connection import make_node_selector
from pipeline.runner.job import Job
from pipeline.runner.run_record import RunFile
from pipeline.runner.shards import RunGraph
from pipeline.runner.stages import MAX_BLOCKS, Plan, Stage, add_stage, start_actors
from pipeline.storage.stores import Store

DISCOVERY_STAGE = Stage(0, 0, 1, "passes on the units that the driver finds", CALLS, 2 * CALLS)


class PruneJob(Job[Todo]):
    """The work of a prune run: decode, encode and prune videos, and write their tokens.

    Args:
        run_id: for the names of token shards.
        record: each plan is saved in it.
        facts: is told the number of encoders of each plan.
    """

    wording = PRUNING
    options: PruneConfig

    def __init__(self, request: Request, stages: PruneStages, run_id: str, record: RunFile, facts: Facts) -> None:
        """Keep the arguments; nothing is planned or started."""
        super().__init__(request.config, request.console)
        self._request = request
        self._stages = stages
        self._run_id = run_id
        self._record = record
        self._facts = facts
        self._todo: Todo | None = None  # of the last plan
        self._total_file_bytes = math.inf

    def can_run_on(self, cluster: Mapping[str, float]) -> bool:
        """Return True if the cluster has CPUs, and also a whole GPU if encoders need one."""
        on_gpus = self._stages.encode.device == "cuda"
        return super().can_run_on(cluster) and (not on_gpus or cluster.get("GPU", 0.0) >= 1)

    def plan(self, items: Todo) -> Resources:
        """Plan the workers for the current nodes, print notes on what the cluster cannot hold, and save the plan.

        Blocks until an archive that has videos to process is indexed, if archives are left.

        Raises:
            RunFailed: the nodes that the run needs are gone, or an archive cannot be indexed.
        """
        cluster = self.require_resources()
        n_videos = items.estimate_count()
        self._todo = items
        self._total_file_bytes = math.inf if items.n_left else count_file_bytes(items.list_todo())
        uncapped, plan = self._plan_workers(cluster, n_videos)
        for note in list_shortfalls(self.options, uncapped, plan, n_videos):
            self.say(f"note: {note}")
        self._facts.set_encoders(plan.encode.workers)
        self._record.save(resources={"cluster": cluster, "plan": asdict(plan)})
        return plan

    def replan(self, n_items: int) -> Resources | None:
        """Plan ``n_items`` videos for the current nodes; None before the first plan and until all videos are known."""
        if self._todo is None or not self._todo.is_complete:  # the number of videos is unknown
            return None
        return self._plan_workers(self.available_resources(), n_items)[1]

    def _plan_workers(self, cluster: Mapping[str, float], n_videos: int) -> tuple[Resources, Resources]:
        """Return the plans (uncapped, fitted) of ``plan_workers``; the fitted plan cuts tasks at row groups."""
        uncapped, plan = plan_workers(self.options, self._stages, cluster, n_videos, self._total_file_bytes)
        return uncapped, replace(plan, rows_per_group=self._request.videos.indexes.rows_per_group)

    def graph(self, items: Todo, plan: Plan, heartbeats: ActorHandle) -> RunGraph:
        """Build the graph for a plan of ``plan`` or ``replan``, on all nodes that are not excluded."""
        assert isinstance(plan, Resources)
        decode = self._stages.decode
        encode = self._stages.encode
        store = self._request.store
        return build_graph(items, decode, encode, plan, store, self._run_id, heartbeats, without=self.excluded_nodes)


def build_graph(
    todo: Todo,
    decode: DecodeSetup,
    encode: EncodeSetup,
    resources: Resources,
    store: Store,
    run_id: str,
    heartbeats: ActorHandle | None = None,
    *,
    without: Collection[str] = (),
) -> RunGraph:
    """Build the graph that turns the videos of ``todo`` into written records; it runs once its batches are read.

    It limits the object store memory of Ray Data to what ``resources`` plans. If archives still have to be indexed,
    this starts an actor and a thread at once, which pass on their videos.

    Args:
        heartbeats: the actor that collects the workers' reports; None for no reports.
        without: the ids of nodes on which no worker may run.
    """
    labels = make_node_selector(without)
    # 1. Manifest: blocks small enough to spread. They are cut here and not by from_arrow, which starts a Ray task per
    # block: such a task requests a whole CPU, waits for it forever and is retried forever.
    videos_per_batch = resources.videos_per_bundle
    if is_discovering := todo.n_left > 0:
        videos = _add_discovery_stage(todo, resources, labels)
    else:
        videos = ray.data.from_blocks(_pack_tasks(todo.list_todo(), resources))
    # 2. Decode: file -> model-ready uint8 frames, or an error row.
    frames = add_stage(videos, Decoder, resources.decode, (decode, heartbeats, videos_per_batch), labels)
    # 3. Encode and prune: frames -> the kept tokens in order of selection. A row is a batch of videos.
    tokens = add_stage(frames, Encoder, resources.encode, (encode, heartbeats), labels)
    # Ray's own limit is half of the object stores, which a fast decoder would fill with frames.
    shape = decode.plan_largest_frames()
    limit = resources.estimate_store_bytes(3 * math.prod(shape), encode.estimate_video_bytes(*shape))
    if is_discovering:
        limit += limit // 2  # Ray Data divides it among the stages, and there is an additional stage
    tokens.context.execution_options.resource_limits = ray.data.ExecutionResources(object_store_memory=limit)
    # 4. Write: one token shard per call, from blocks that the driver collects.
    writers = partial(start_actors, Writer, resources.write, (store, run_id, heartbeats, encode.codec), labels)
    return RunGraph(tokens, resources.videos_per_shard, writers, items_per_row=videos_per_batch)


def _pack_tasks(todo: pa.Table, resources: Resources, later_bytes: int = 0) -> list[pa.Table]:
    """Divide rows of videos (TODO_SCHEMA) into decode tasks, and pack each as a row of TASK_SCHEMA.

    Args:
        later_bytes: bytes of the videos that follow later; while many follow, tasks are larger.
    """
    return [pack_task(todo.slice(start, end - start)) for start, end in resources.blocks(todo, later_bytes)]


def _add_discovery_stage(todo: Todo, resources: Resources, labels: Mapping[str, str] | None) -> ray.data.Dataset:
    """Start a thread that passes on decode tasks while archives are indexed; return the dataset of these tasks.

    An actor on this node stores the tasks. An error of the thread goes to ``todo.fail``.
    """
    # On this node only: another node could be lost together with the tasks.
    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    feed = ray.remote(TaskFeed).options(num_cpus=0, max_concurrency=1000, scheduling_strategy=strategy).remote()

    def feed_tasks() -> None:
        """Put the units of each part into the feed; runs in a thread."""
        try:
            for number, part in enumerate(todo.parts()):
                feed.put.remote(number, [ray.put(_pack_tasks(part.todo, resources, part.later_bytes))])
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            todo.fail(error)

    threading.Thread(target=feed_tasks, name="units", daemon=True).start()
    numbers = range(todo.n_parts)
    at_once = math.ceil(todo.n_parts / MAX_BLOCKS)
    blocks = [numbers[start : start + at_once] for start in numbers[::at_once]]
    parts = ray.data.from_blocks([pa.table({"part": list(block)}) for block in blocks])
    return add_stage(parts, TaskSource, DISCOVERY_STAGE, (feed,), labels)


class TaskFeed:
    """The actor that stores the decode tasks of each part, so that a retried call gets the same tasks again."""

    def __init__(self) -> None:
        self._parts: dict[int, list[ray.ObjectRef]] = {}
        self._new_part = asyncio.Condition()

    async def put(self, number: int, units: list[ray.ObjectRef]) -> None:
        """Store the reference to the tasks of part ``number``; the list around it keeps Ray from fetching them."""
        async with self._new_part:
            self._parts[number] = units
            self._new_part.notify_all()

    async def part(self, number: int) -> list[ray.ObjectRef]:
        """Wait until the tasks of part ``number`` are stored, and return the list with their reference."""
        async with self._new_part:
            await self._new_part.wait_for(lambda: number in self._parts)
        return self._parts[number]


class TaskSource:
    """The stage before decoding while archives are indexed: it maps the number of a part to the part's tasks."""

    def __init__(self, feed: ActorHandle) -> None:
        self._feed = feed

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Wait until the tasks of a part are known, and yield a row of TASK_SCHEMA for each."""
        for unit in ray.get(ray.get(self._feed.part.remote(batch["part"][0].as_py()))):
            yield from unit
