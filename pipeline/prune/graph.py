"""The stages in order, and the resources of each: the page to read first.

    manifest -> decode (CPU actors, killable child processes) -> encode + prune (GPU actors)
        -> the driver bundles references, by number or age -> write (actors) -> the driver commits

Videos travel in bundles: several together, a very large one alone (``pipeline.prune.batches``). Encode and prune share
an actor, so that a video's full tokens (45 MB for 32 frames of LLaVA-OneVision-7B) never cross the object store; decode
is a stage of its own, so that nodes without GPUs can take it.
Ray Data runs these two. An encoded video waits at most --flush-seconds to be written (``pipeline.execution.shards``).
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.execution.cluster import node_selector
from pipeline.execution.shards import RunGraph
from pipeline.execution.stages import MAX_BLOCKS, Plan, Stage, StageWords, Wording, add_stage, start_actors
from pipeline.inputs.discovery import Discovery
from pipeline.inputs.units import units
from pipeline.prune.batches import unit_of
from pipeline.prune.decode_stage import Decoder, DecodeSetup
from pipeline.prune.encode_stage import Encoder, EncodeSetup
from pipeline.prune.write_stage import Writer
from pipeline.storage.stores import Store

PRUNING = Wording(
    doing="pruning",
    item="video",
    stages={
        "decode": StageWords("decoded", "look at that host, and at the storage of that video"),
        "encode": StageWords("encoded", "look at that host and its GPU"),
        "write": StageWords("written", "look at the storage behind --out"),
    },
    to_lower="--encode-workers and --decode-workers",
)


@dataclass(frozen=True)
class Resources(Plan):
    """The resources that the stages of a prune run reserve, and the sizes of its blocks, bundles and shards."""

    wording: ClassVar[Wording] = PRUNING

    decode: Stage
    encode: Stage
    write: Stage
    videos_per_block: int
    videos_per_shard: int
    videos_per_bundle: int = 1
    rows_per_group: int = 1

    def store_bytes(self, frame_bytes: int, token_bytes: int) -> int:
        """Return the bytes of object store that waiting videos need, beside those that workers have in hand.

        That is a few bundles a decoder, the videos on their way to each encoder, and a few shards. ``frame_bytes`` and
        ``token_bytes`` are those of one video. With less room than the collected and held shards take, Ray would creep:
        it lets out one block in ten seconds.
        """
        bundles = 4 * self.decode.workers + (self.encode.in_flight or 4) * self.encode.workers
        frames = bundles * max(self.videos_per_bundle * frame_bytes, LEAST_BYTES)
        return frames + self.shards_at_once * self.videos_per_shard * token_bytes

    def fitting(self, store_bytes: float, frame_bytes: int, token_bytes: int, n_videos: int) -> Resources:
        """Return these resources with bundles, shards and queues sized by the bytes that a video takes.

        Videos share a bundle as long as there are enough bundles for all workers and the object stores hold them.
        Enough videos are on their way to an encoder that it does not wait for the driver, which looks ten times a
        second; but in a short run at most an eighth of its share, since other encoders may finish earlier, and at most
        a quarter of the object stores. Shards are so small that those held at once fit half of the object stores,
        which is Ray's own limit.
        """
        room = store_bytes / 2 / (self.shards_at_once * max(token_bytes, 1))
        shard = max(1, int(min(self.videos_per_shard, room)))
        workers = self.decode.workers + self.encode.workers
        at_once = 4 * self.decode.workers + 2 * CALLS * self.encode.workers  # bundles: see store_bytes
        held = min(BUNDLE_BYTES, store_bytes / 2 / at_once)
        most = min(MOST_BUNDLED, int(held / max(frame_bytes, 1)), n_videos // (16 * workers), shard)
        # About a divisor of the shard, which holds whole bundles.
        bundle = math.ceil(shard / math.ceil(shard / max(1, most)))
        share = n_videos // (8 * bundle * self.encode.workers)
        fit = int(store_bytes / 4 / (self.encode.workers * bundle * max(frame_bytes, 1)))
        in_flight = max(2 * CALLS, min(max(4, UNDER_WAY // bundle), share, fit))
        return replace(
            self,
            videos_per_shard=shard,
            videos_per_bundle=bundle,
            videos_per_block=bundle * max(1, self.videos_per_block // bundle),
            encode=replace(self.encode, in_flight=in_flight),
        )

    def blocks(self, videos: pa.Table, later_bytes: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each block of videos (TODO_SCHEMA), which is the unit of work and of retry.

        The last blocks are one bundle each, so that few videos wait for a slow worker when the others have none left.
        Videos of containers are cut by what they share of these (``pipeline.inputs.units``), of which those of
        ``later_bytes`` come later.
        """
        n_videos = len(videos)
        if videos["source_offset"].null_count < n_videos:
            most = max(MOST_OF_A_UNIT, n_videos // MAX_BLOCKS)
            shared = self.videos_per_bundle, self.rows_per_group
            return units(videos, self.decode.workers, most, *shared, later_bytes)
        last = self.decode.workers * (self.decode.in_flight or 1) * self.videos_per_block
        head = max(0, n_videos - last) // self.videos_per_block * self.videos_per_block
        starts = [*range(0, head, self.videos_per_block), *range(head, n_videos, self.videos_per_bundle)]
        return pairwise([*starts, n_videos])

    @property
    def shards_at_once(self) -> int:
        """The number of shards held at once: one is collected, one waits, and each writer has two."""
        return 2 * self.write.workers + 2

    @property
    def workers(self) -> str:
        """A description of the workers that start."""
        return f"{self.decode.workers} to decode, {self.encode.workers} to encode, which load the model first"

    def collected(self, stage: str, waits: bool) -> int:
        """Return the number of videos that a stage waits for before it takes any.

        A whole shard is collected before it is written, unless it is the last, and each worker of the stage before may
        be about to hand bundles over.
        """
        if not waits:
            return 1
        before = {"encode": self.decode, "write": self.encode}.get(stage)
        handed_over = before.workers * before.calls * self.videos_per_bundle if before else 0
        return handed_over + (self.videos_per_shard if stage == "write" else 1)


LEAST_BYTES = 8 * 2**20  # bytes granted to the videos of a worker, however small these are
# At most so many bytes of frames, which a bundle of several videos costs a copy, and so many videos in a bundle.
# Four videos of 32 frames take an encoder half a second: so long the first may wait for the last.
BUNDLE_BYTES, MOST_BUNDLED = 64 * 2**20, 32
MOST_OF_A_UNIT = 256  # videos of a container that one call reads, and decodes again if its worker dies
DECODER_BYTES = 2**30  # memory of a decoder: two processes, the packets of a file, and the frames in hand
# Bytes of video files for which another decoder is worth its start of a second: half a minute at 1 Mbit/s.
DECODER_FILES_BYTES = 4 * 2**20
# With --decoder nvdec, the share of a GPU that its decoders reserve, and how many they are. Four did 5.3 clips a second
# of 10 s of 720p on an H200; more were not measured.
DECODING_OF_A_GPU, DECODERS_A_GPU = 0.2, 4
CPU_ENCODERS_PER_WRITER = 4  # encoders without a GPU that share a writer: each is far slower than one can write
CALLS = 2  # calls at a time in a worker: one moves data while the other computes
FINDING = Stage(0, 0, 1, "hands over what the driver finds", CALLS, 2 * CALLS)
UNDER_WAY = 16  # videos on their way to an encoder: enough for a quarter of a second at 15 ms each
# The driver commits the records of a shard at once, and makes a reference to each of its videos an argument of a call.
RECORDS_BYTES = 8 * 2**20
RECORD_BYTES, FRAME_RECORD_BYTES = 4096, 64  # upper bounds of a video's record, and of each frame in it


def videos_for(shard_bytes: int, token_bytes: int, n_frames: int) -> int:
    """Return the number of videos that fill a shard of ``shard_bytes``.

    A shard is bundled from whole bundles, never filled by several tasks, so that a retried task writes the same file.
    It has no more videos than the driver can commit the records of at once.
    """
    records = RECORDS_BYTES // (RECORD_BYTES + FRAME_RECORD_BYTES * n_frames)
    return max(1, min(shard_bytes // max(token_bytes, 1), records))


def plan_resources(
    cpus: float,
    gpus: float,
    n_videos: int,
    *,
    memory: float = math.inf,
    files_bytes: float = math.inf,
    videos_per_shard: int = 16,
    decode_workers: int | None = None,
    encode_workers: int | None = None,
    encoders_per_gpu: int = 1,
    decode_on_gpus: bool = False,
) -> Resources:
    """Divide a cluster of ``cpus``, ``gpus`` and bytes of ``memory`` among the workers for ``n_videos``.

    ``files_bytes`` are the bytes of their files, infinite if they are not known.

    Decoders reserve every CPU, since decoding is what most runs wait for, and the others reserve none: the system
    shares the cores with an encoder, which often waits, and both find room on any node.
    """
    cores = max(1, int(cpus))
    most = encoders_per_gpu * int(gpus) if gpus >= 1 else cores
    encoders = max(1, min(encode_workers or (most if gpus >= 1 else int(cpus // 4)), most, n_videos))
    useful = decode_workers or math.ceil(min(files_bytes / DECODER_FILES_BYTES, cores))
    decoders = max(1, min(useful, cores, int(min(memory / DECODER_BYTES, cores)), n_videos))
    decode_gpu, encode_gpu = 0.0, 1.0 if gpus >= 1 else 0.0
    if decode_on_gpus and gpus >= 1:
        decoders = min(decoders, decode_workers or DECODERS_A_GPU * int(gpus))
        decode_gpu = int(1e4 * DECODING_OF_A_GPU / math.ceil(decoders / int(gpus))) / 1e4  # Ray counts so finely
        encode_gpu = 1 - DECODING_OF_A_GPU
    encode_gpu = int(1e4 * encode_gpu / encoders_per_gpu) / 1e4
    # A GPU's encoder gives 18 videos of 11.2 MB a second, and beside busy decoders each takes a writer 74 to 106 ms
    # (one H200, 16 cores). An encoder of four cores gives less than one a second.
    writers = min(1 + 2 * encoders, n_videos) if gpus >= 1 else math.ceil(encoders / CPU_ENCODERS_PER_WRITER)
    # Small runs use small shards: progress shows, a killed run loses little, and every writer has its share.
    shard = max(1, min(videos_per_shard, n_videos // max(16, 4 * encoders)))
    return Resources(
        decode=Stage(min(1.0, cpus), decode_gpu, decoders, "a decode child runs one thread", CALLS, 2 * CALLS),
        encode=Stage(0, encode_gpu, encoders, "one model a GPU, or four cores", CALLS, 2 * CALLS),
        write=Stage(0, 0, writers, "hashing and one file write; must find room while the others hold the CPUs"),
        # A block is the unit of work and of retry: few videos, but no more blocks than the driver tracks lightly.
        videos_per_block=max(1, min(4, n_videos // (4 * decoders)), n_videos // MAX_BLOCKS),
        videos_per_shard=shard,
    )


def build_graph(
    todo: pa.Table | Discovery,
    decode: DecodeSetup,
    encode: EncodeSetup,
    resources: Resources,
    store: Store,
    run_id: str,
    heartbeats: ActorHandle | None = None,
    *,
    without: Collection[str] = (),
) -> RunGraph:
    """Build the graph that makes the written records of ``todo``; nothing runs until its parts are asked for.

    ``without`` holds the ids of nodes on which no worker may run.
    """
    labels = node_selector(without)
    # 1. Manifest: blocks small enough to spread. They are cut here and made without a task (from_arrow starts one a
    # block): tasks of Ray's own ask for a whole CPU, wait for it without end and are tried again without end.
    bundle = resources.videos_per_bundle
    if isinstance(todo, Discovery):
        videos = _found(todo, resources, labels)
    else:
        videos = ray.data.from_blocks(_units(todo, resources))
    # 2. Decode: file -> model-ready uint8 frames, or an error row.
    frames = add_stage(videos, Decoder, resources.decode, (decode, heartbeats, bundle), labels)
    # 3. Encode and prune: frames -> the kept tokens in order of selection. A row is a bundle.
    tokens = add_stage(frames, Encoder, resources.encode, (encode, heartbeats), labels)
    # Ray's own limit is half of the object stores, which a fast decoder would fill with frames.
    shape = decode.largest_frames()
    limit = resources.store_bytes(3 * math.prod(shape), encode.bytes_per_video(*shape))
    if isinstance(todo, Discovery):
        limit += limit // 2  # Ray Data divides it among the stages, of which there is one more
    tokens.context.execution_options.resource_limits = ray.data.ExecutionResources(object_store_memory=limit)
    # 4. Write: one token shard a call, of what the driver has bundled.
    writers = partial(start_actors, Writer, resources.write, (store, run_id, heartbeats, encode.codec), labels)
    return RunGraph(tokens, resources.videos_per_shard, writers, items_per_row=bundle)


def _units(todo: pa.Table, resources: Resources, later_bytes: int = 0) -> list[pa.Table]:
    """Pack the rows of videos (TODO_SCHEMA) as units of work, a row of UNIT each."""
    return [unit_of(todo.slice(start, end - start)) for start, end in resources.blocks(todo, later_bytes)]


def _found(discovery: Discovery, resources: Resources, labels: Mapping[str, str] | None) -> ray.data.Dataset:
    """Return the dataset of the units of work of videos that are found while it runs; a thread hands them over."""
    # Nowhere else: with another node it could be lost, and what it knows with it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    feed = ray.remote(Feed).options(num_cpus=0, max_concurrency=1000, scheduling_strategy=here).remote()

    def hand_over() -> None:
        try:
            for number, part in enumerate(discovery.parts()):
                feed.put.remote(number, [ray.put(_units(part.todo, resources, part.later_bytes))])
        except Exception as error:  # noqa: BLE001 - it is the main thread's
            discovery.fail(error)

    threading.Thread(target=hand_over, name="units", daemon=True).start()
    numbers, at_once = range(discovery.n_parts), math.ceil(discovery.n_parts / MAX_BLOCKS)
    blocks = [numbers[start : start + at_once] for start in numbers[::at_once]]
    parts = ray.data.from_blocks([pa.table({"part": list(block)}) for block in blocks])
    return add_stage(parts, FoundUnits, FINDING, (feed,), labels)


class Feed:
    """The actor that knows the units of each part from when they are found; a retried call gets the same again."""

    def __init__(self) -> None:
        self._parts: dict[int, list[ray.ObjectRef]] = {}
        self._changed = asyncio.Condition()

    async def put(self, number: int, units: list[ray.ObjectRef]) -> None:
        """Take a reference to the units of a part, in a list, so that Ray does not fetch them."""
        async with self._changed:
            self._parts[number] = units
            self._changed.notify_all()

    async def part(self, number: int) -> list[ray.ObjectRef]:
        """Return the reference to the units of a part, in a list, once they are found."""
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._parts)
        return self._parts[number]


class FoundUnits:
    """The stage before decoding in a run that finds its videos on the way: the number of a part -> its units."""

    def __init__(self, feed: ActorHandle) -> None:
        self._feed = feed

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for found in ray.get(ray.get(self._feed.part.remote(batch["part"][0].as_py()))):
            yield from found
