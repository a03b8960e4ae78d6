"""The resources of a prune run: how the cluster is divided among its stages, and the sizes of blocks and shards."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import PruneStages
from pipeline.runner.stages import MAX_BLOCKS, Plan, Stage, StageWords, Wording
from pipeline.storage.hub import is_remote

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
UNDER_WAY = 16  # videos on their way to an encoder: enough for a quarter of a second at 15 ms each
# The driver commits the records of a shard at once, and makes a reference to each of its videos an argument of a call.
RECORDS_BYTES = 8 * 2**20
RECORD_BYTES, FRAME_RECORD_BYTES = 4096, 64  # upper bounds of a video's record, and of each frame in it
# If there are no more videos, the sizes of their files decide how many decoders are worth starting.
FILES_LOOKED_AT = 256


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
        Videos of containers are cut by what they share of these (``pipeline.prune.resources``), of which those of
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
    decode_on_gpus: bool = False,
) -> Resources:
    """Divide a cluster of ``cpus``, ``gpus`` and bytes of ``memory`` among the workers for ``n_videos``.

    ``files_bytes`` are the bytes of their files, infinite if they are not known.

    Decoders reserve every CPU, since decoding is what most runs wait for, and the others reserve none: the system
    shares the cores with an encoder, which often waits, and both find room on any node.
    """
    cores = max(1, int(cpus))
    most = int(gpus) if gpus >= 1 else cores
    encoders = max(1, min(encode_workers or (most if gpus >= 1 else int(cpus // 4)), most, n_videos))
    useful = decode_workers or math.ceil(min(files_bytes / DECODER_FILES_BYTES, cores))
    decoders = max(1, min(useful, cores, int(min(memory / DECODER_BYTES, cores)), n_videos))
    decode_gpu, encode_gpu = 0.0, 1.0 if gpus >= 1 else 0.0
    if decode_on_gpus and gpus >= 1:
        decoders = min(decoders, decode_workers or DECODERS_A_GPU * int(gpus))
        decode_gpu = int(1e4 * DECODING_OF_A_GPU / math.ceil(decoders / int(gpus))) / 1e4  # Ray counts so finely
        encode_gpu = 1 - DECODING_OF_A_GPU
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


def planned_workers(
    config: PruneConfig, setups: PruneStages, cluster: Mapping[str, float], n_videos: int, file_bytes: float = math.inf
) -> tuple[Resources, Resources]:
    """Plan the workers for ``n_videos`` of ``file_bytes`` in all: as wanted, and as the object stores allow."""
    shape, encode = setups.decode.largest_frames(), setups.encode
    by_size = videos_for(config.target_shard_mb * 10**6, encode.stored_bytes_per_video(*shape), shape[0])
    wanted = plan_resources(
        cluster["CPU"],
        cluster.get("GPU", 0.0) if encode.device == "cuda" else 0.0,
        n_videos,
        memory=cluster.get("memory", math.inf),
        files_bytes=file_bytes,
        videos_per_shard=config.videos_per_shard or by_size,
        decode_workers=config.decode_workers,
        encode_workers=config.encode_workers,
        decode_on_gpus=config.decoder == "nvdec",
    )
    sizes = 3 * math.prod(shape), encode.bytes_per_video(*shape)
    return wanted, wanted.fitting(cluster["object_store_memory"], *sizes, n_videos)


def files_bytes(videos: pa.Table) -> float:
    """Return the total bytes of the files of ``videos`` (TODO_SCHEMA).

    It is infinite if there are many videos, or if a size is not known here: then all decoders are started.
    """
    if len(videos) > FILES_LOOKED_AT:
        return math.inf
    rows = videos.select(["uri", "policy", "size"]).to_pylist()
    return sum(_file_bytes(row["uri"], row["size"]) for row in rows if row["policy"] is None)


def _file_bytes(path: str, listed: int | None) -> float:
    """Return a file's size: as listed, or measured on this machine; infinite if neither is known."""
    if listed is not None or is_remote(path):
        return math.inf if listed is None else listed
    return os.path.getsize(path) if os.path.isfile(path) else math.inf  # noqa: PTH202, PTH113 - as manifests have it


def shortfalls(config: PruneConfig, wanted: Resources, plan: Resources, n_videos: int) -> Iterator[str]:
    """Yield a note for each requested number of workers that the cluster cannot hold."""
    for name, asked, given in (
        ("decode-workers", config.decode_workers, plan.decode.workers),
        ("encode-workers", config.encode_workers, plan.encode.workers),
    ):
        if asked is not None and given < min(asked, n_videos):
            yield f"the cluster has room for {given} of --{name} {asked}"
    if plan.videos_per_shard < wanted.videos_per_shard:
        yield f"shards get {plan.videos_per_shard} videos: more would not fit Ray's object stores"


RANGE_BYTES = 2**28  # most bytes of a unit of several videos
UNITS_AHEAD = 4  # units of what is left that each worker could get


def units(
    videos: pa.Table, workers: int, most_videos: int, bundle: int = 1, row_group: int = 1, later_bytes: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each unit of ``videos`` (MANIFEST_SCHEMA), which follow from their order and sizes alone.

    A unit has at most RANGE_BYTES and ``most_videos``. Units become smaller towards the end, so that few videos wait
    for a slow worker when the others have none left. Each has whole bundles of ``bundle`` videos, and whole row groups
    of ``row_group`` rows where tables have such, as far as that is possible. Behind ``videos`` come others of
    ``later_bytes``, presumably of like size.
    """
    n_videos = len(videos)
    ends = np.concatenate([[0], np.cumsum(pc.fill_null(videos["size"], 0).to_numpy())])
    heads = _heads(videos, row_group) if row_group > 1 else None
    start, share = 0, UNITS_AHEAD * workers
    later_videos = later_bytes * n_videos // int(ends[-1]) if ends[-1] else 0  # tables do not tell sizes
    while start < n_videos:
        room = min(RANGE_BYTES, (ends[-1] - ends[start] + later_bytes) // share)
        by_bytes = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1 - start
        length = max(1, min(by_bytes, most_videos, -(-(n_videos + later_videos - start) // share)))
        stop = start + -(-length // bundle) * bundle
        if heads is not None:  # the last row group that begins in the unit, or the next one, is the next unit's
            later = heads[np.searchsorted(heads, start, side="right") :]
            place = int(np.searchsorted(later, stop, side="right"))
            stop = int(later[max(0, place - 1)]) if len(later) else n_videos
            stop = min(stop, start + most_videos)
        yield start, min(stop, n_videos)
        start = min(stop, n_videos)


def _heads(videos: pa.Table, row_group: int) -> NDArray[np.int64]:
    """Return the places of the videos with which a row group begins; each member of a tar or zip is its own."""
    offsets = pc.fill_null(videos["source_offset"], 0).to_numpy()
    groups = offsets // row_group
    new = (groups[1:] != groups[:-1]) | (offsets[1:] < offsets[:-1])
    return np.flatnonzero(np.concatenate([[True], new]))
