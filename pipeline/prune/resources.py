"""The resources of a prune run: the workers of each stage, and the sizes of tasks, batches and shards."""

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


MIN_WORKER_BYTES = 8 * 2**20  # minimum memory for the videos of a worker
# The frames of a batch of several videos are copied, and its first video waits for the last. Four videos of 32 frames
# take an encoder half a second.
MAX_BATCH_BYTES, MAX_VIDEOS_PER_BATCH = 64 * 2**20, 32
MAX_VIDEOS_PER_TASK = 256  # videos of archives in a decode task, all of which a retry decodes again
DECODER_BYTES = 2**30  # memory of a decoder: two processes, the packets of a file, and the frames in hand
# Copies of the frames that a decoder has in hand at once, if a typical video has more than MAX_BATCH_BYTES.
LARGE_VIDEO_COPIES = 3
# Bytes of video files that justify another decoder, which takes a second to start: half a minute at 1 Mbit/s.
DECODER_FILES_BYTES = 4 * 2**20
# With --decoder nvdec: the share of a GPU that its decoders reserve together, and their number. Four decoders did 5.3
# clips of 10 s of 720p a second on an H200; more were not measured.
NVDEC_SHARE_PER_GPU, NVDEC_DECODERS_PER_GPU = 0.2, 4
CPU_ENCODERS_PER_WRITER = 4  # CPU encoders that share a writer: a writer is far faster
CALLS = 2  # concurrent calls per worker: one moves data while the other computes
VIDEOS_AHEAD_PER_ENCODER = 16  # queued videos: enough for a quarter of a second at 15 ms each
# The driver holds all records of a shard in memory, and passes a reference to each of its batches to a call.
MAX_RECORDS_BYTES = 8 * 2**20
RECORD_BYTES, FRAME_RECORD_BYTES = 4096, 64  # upper bounds of a video's record, and of each of its frames
# Up to this number of videos, the sizes of their files decide the number of decoders.
MAX_MEASURED_FILES = 256


@dataclass(frozen=True)
class Resources(Plan):
    """The resources that the stages of a prune run reserve, and the sizes of its tasks, batches and shards.

    Attributes:
        videos_per_block: the number of videos in a decode task, unless archives hold them.
        videos_per_shard: the maximum number of videos in a shard.
        videos_per_bundle: the number of videos in a batch.
        rows_per_group: the rows in a row group of the tables that hold videos; 1 if there are none.
    """

    wording: ClassVar[Wording] = PRUNING

    decode: Stage
    encode: Stage
    write: Stage
    videos_per_block: int
    videos_per_shard: int
    videos_per_bundle: int = 1
    rows_per_group: int = 1

    def estimate_store_bytes(self, frame_bytes: int, token_bytes: int) -> int:
        """Estimate the object store memory for waiting videos, without the videos that workers have in hand.

        If waiting shards take more, Ray slows down to one block in ten seconds. The arguments are the bytes of one
        video before and after the encode stage.
        """
        bundles = (self.decode.in_flight or 4) * self.decode.workers
        bundles += (self.encode.in_flight or 4) * self.encode.workers
        frames = bundles * max(self.videos_per_bundle * frame_bytes, MIN_WORKER_BYTES)
        return frames + self.shards_at_once * self.videos_per_shard * token_bytes

    def fit_to_stores(
        self, store_bytes: float, frame_bytes: int, token_bytes: int, n_videos: int, usual_bytes: int = 0
    ) -> Resources:
        """Return a copy with the sizes of batches, shards and queues fitted to the object stores.

        - A batch has at most MAX_VIDEOS_PER_BATCH videos and MAX_BATCH_BYTES of frames, unless one video has more.
          There are at least 16 batches per worker, if possible, and the object stores hold those of all workers.
        - An encoder queues about VIDEOS_AHEAD_PER_ENCODER videos, but at least 4 batches, and at most an eighth of its
          share.
        - All queues together take at most a quarter of the object stores, unless that is less than the minimum of 2 *
          CALLS batches per encoder. All shards in memory take at most half, unless one video per shard is more.
        - If a typical video has more than MAX_BATCH_BYTES of frames, the minimum is CALLS batches, no call waits at a
          decoder, and there are only as many decoders as the results of their first calls fit half of the object
          stores.

        Args:
            store_bytes: the capacity of all object stores together.
            frame_bytes, token_bytes: the bytes of the largest planned video before and after the encode stage.
            usual_bytes: the bytes of the frames of a typical video.
        """
        max_shard = store_bytes / 2 / (self.shards_at_once * max(token_bytes, 1))
        shard = max(1, int(min(self.videos_per_shard, max_shard)))
        workers = self.decode.workers + self.encode.workers
        at_once = 4 * self.decode.workers + 2 * CALLS * self.encode.workers  # batches: see store_bytes
        bundle_bytes = min(MAX_BATCH_BYTES, store_bytes / 2 / at_once)
        max_bundle = min(
            MAX_VIDEOS_PER_BATCH, int(bundle_bytes / max(frame_bytes, 1)), n_videos // (16 * workers), shard
        )
        # About a divisor of the shard, which holds whole batches.
        bundle = math.ceil(shard / math.ceil(shard / max(1, max_bundle)))
        share = n_videos // (8 * bundle * self.encode.workers)
        fit = int(store_bytes / 4 / (self.encode.workers * bundle * max(frame_bytes, 1)))
        decode = self.decode
        least = 2 * CALLS
        if usual_bytes > MAX_BATCH_BYTES:
            decoders = max(1, int(store_bytes / 2 / (CALLS * usual_bytes)))
            least = CALLS
            decode = replace(decode, workers=min(decode.workers, decoders), in_flight=CALLS)
        in_flight = max(least, min(max(4, VIDEOS_AHEAD_PER_ENCODER // bundle), share, fit))
        return replace(
            self,
            decode=decode,
            videos_per_shard=shard,
            videos_per_bundle=bundle,
            videos_per_block=bundle * max(1, self.videos_per_block // bundle),
            encode=replace(self.encode, in_flight=in_flight),
        )

    def blocks(self, videos: pa.Table, later_bytes: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the (start, stop) of each decode task among ``videos`` (TODO_SCHEMA).

        Tasks have ``videos_per_block`` videos. The videos of the last ``in_flight`` tasks per decoder are cut into
        single batches, so that few videos wait for a slow worker. If any video is in an archive, ``cut_tasks`` cuts all
        instead, which needs ``later_bytes``, the bytes of later videos in archives.
        """
        n_videos = len(videos)
        if videos["source_offset"].null_count < n_videos:
            max_unit = max(MAX_VIDEOS_PER_TASK, n_videos // MAX_BLOCKS)
            sizes = self.videos_per_bundle, self.rows_per_group
            return cut_tasks(videos, self.decode.workers, max_unit, *sizes, later_bytes)
        last = self.decode.workers * (self.decode.in_flight or 1) * self.videos_per_block
        head = max(0, n_videos - last) // self.videos_per_block * self.videos_per_block
        starts = [*range(0, head, self.videos_per_block), *range(head, n_videos, self.videos_per_bundle)]
        return pairwise([*starts, n_videos])

    @property
    def shards_at_once(self) -> int:
        """The number of shards in memory: one that fills up, one that waits, and two per writer."""
        return 2 * self.write.workers + 2

    @property
    def workers(self) -> str:
        """A description of the decoders and encoders that start, for messages."""
        return f"{self.decode.workers} to decode, {self.encode.workers} to encode, which load the model first"

    def min_items_to_start(self, stage: str, more_expected: bool) -> int:
        """Return the number of waiting videos at which ``stage`` is expected to start; 1 unless ``more_expected``.

        Each worker of the preceding stage may hold finished batches that it has not passed on.
        """
        if not more_expected:
            return 1
        before = {"encode": self.decode, "write": self.encode}.get(stage)
        handed_over = before.workers * before.calls * self.videos_per_bundle if before else 0
        return handed_over + (self.videos_per_shard if stage == "write" else 1)


def count_videos_per_shard(shard_bytes: int, token_bytes: int, n_frames: int) -> int:
    """Return the number of videos that fill a shard of ``shard_bytes``, at least 1, limited by the records in memory.

    Args:
        token_bytes, n_frames: the stored bytes and the sampled frames of one video.
    """
    records = MAX_RECORDS_BYTES // (RECORD_BYTES + FRAME_RECORD_BYTES * n_frames)
    return max(1, min(shard_bytes // max(token_bytes, 1), records))


def plan_resources(
    cpus: float,
    gpus: float,
    n_videos: int,
    *,
    memory: float = math.inf,
    total_file_bytes: float = math.inf,
    usual_bytes: int = 0,
    videos_per_shard: int = 16,
    decode_workers: int | None = None,
    encode_workers: int | None = None,
    decode_on_gpus: bool = False,
) -> Resources:
    """Divide a cluster among the workers for ``n_videos`` videos; each stage has at least one worker.

    A decoder reserves one CPU. Encoders and writers reserve none.

    Args:
        cpus, gpus: of the cluster. By default there is a decoder per CPU and an encoder per GPU; if ``gpus`` is below
            1, an encoder per four CPUs.
        memory: the bytes of memory for decoders, of which each needs DECODER_BYTES, or more for large videos.
        total_file_bytes: the bytes of all videos' files, which allow a decoder per DECODER_FILES_BYTES; infinite if
            unknown.
        usual_bytes: the bytes of the frames of a typical video.
        videos_per_shard: the maximum; small runs get at least 16 shards, and 4 per encoder.
        decode_workers, encode_workers: the maximum; None for the default.
        decode_on_gpus: True if decoders reserve a share of the GPUs, by default NVDEC_DECODERS_PER_GPU on each.
    """
    cores = max(1, int(cpus))
    max_encoders = int(gpus) if gpus >= 1 else cores
    encoders = max(1, min(encode_workers or (max_encoders if gpus >= 1 else int(cpus // 4)), max_encoders, n_videos))
    useful_decoders = decode_workers or math.ceil(min(total_file_bytes / DECODER_FILES_BYTES, cores))
    decoder_bytes = DECODER_BYTES + (LARGE_VIDEO_COPIES * usual_bytes if usual_bytes > MAX_BATCH_BYTES else 0)
    decoders = max(1, min(useful_decoders, cores, int(min(memory / decoder_bytes, cores)), n_videos))
    decode_gpu, encode_gpu = 0.0, 1.0 if gpus >= 1 else 0.0
    if decode_on_gpus and gpus >= 1:
        decoders = min(decoders, decode_workers or NVDEC_DECODERS_PER_GPU * int(gpus))
        decode_gpu = int(1e4 * NVDEC_SHARE_PER_GPU / math.ceil(decoders / int(gpus))) / 1e4  # Ray's resolution
        encode_gpu = 1 - NVDEC_SHARE_PER_GPU
    # An encoder on a GPU produces 18 videos of 11.2 MB per second, and beside busy decoders a writer needs 74 to 106 ms
    # for each (one H200, 16 cores). An encoder on four cores produces less than one video per second.
    writers = min(1 + 2 * encoders, n_videos) if gpus >= 1 else math.ceil(encoders / CPU_ENCODERS_PER_WRITER)
    # Small runs use small shards: progress shows, a killed run loses little, and every writer has its share.
    shard = max(1, min(videos_per_shard, n_videos // max(16, 4 * encoders)))
    return Resources(
        decode=Stage(min(1.0, cpus), decode_gpu, decoders, "a decode child runs one thread", CALLS, 2 * CALLS),
        encode=Stage(0, encode_gpu, encoders, "one model a GPU, or four cores", CALLS, 2 * CALLS),
        write=Stage(0, 0, writers, "hashing and one file write; must start while decoders reserve all CPUs"),
        # A retry decodes a whole block again: so few videos, but no more blocks than the driver tracks easily.
        videos_per_block=max(1, min(4, n_videos // (4 * decoders)), n_videos // MAX_BLOCKS),
        videos_per_shard=shard,
    )


def plan_workers(
    config: PruneConfig, setups: PruneStages, cluster: Mapping[str, float], n_videos: int, file_bytes: float = math.inf
) -> tuple[Resources, Resources]:
    """Plan the workers for ``n_videos`` videos on a cluster, within the limits of the options.

    Encoders use the GPUs of the cluster only if the device of ``setups`` is "cuda". Shards have at most the videos of
    ``--videos-per-shard``, or the full HD videos of maximum length in ``--target-shard-mb``.

    Args:
        cluster: Ray's resources by name; CPU and object_store_memory are required.
        file_bytes: the bytes of all videos' files; infinite if unknown.

    Returns:
        (uncapped, fitted): the plan before and after ``Resources.fit_to_stores``.
    """
    shape = setups.decode.plan_largest_frames()
    encode = setups.encode
    usual_bytes = 3 * math.prod(setups.decode.plan_typical_frames())
    by_size = count_videos_per_shard(config.target_shard_mb * 10**6, encode.estimate_stored_bytes(*shape), shape[0])
    uncapped = plan_resources(
        cluster["CPU"],
        cluster.get("GPU", 0.0) if encode.device == "cuda" else 0.0,
        n_videos,
        memory=cluster.get("memory", math.inf),
        total_file_bytes=file_bytes,
        usual_bytes=usual_bytes,
        videos_per_shard=config.videos_per_shard or by_size,
        decode_workers=config.decode_workers,
        encode_workers=config.encode_workers,
        decode_on_gpus=config.decoder == "nvdec",
    )
    sizes = 3 * math.prod(shape), encode.estimate_video_bytes(*shape)
    return uncapped, uncapped.fit_to_stores(cluster["object_store_memory"], *sizes, n_videos, usual_bytes)


def count_file_bytes(videos: pa.Table) -> float:
    """Return the total bytes of the files of ``videos`` (TODO_SCHEMA), without videos that may not be read.

    Infinity if there are more than MAX_MEASURED_FILES videos or a size is unknown.
    """
    if len(videos) > MAX_MEASURED_FILES:
        return math.inf
    rows = videos.select(["uri", "policy", "size"]).to_pylist()
    return sum(_measure_file_bytes(row["uri"], row["size"]) for row in rows if row["policy"] is None)


def _measure_file_bytes(path: str, listed_bytes: int | None) -> float:
    """Return the listed size of a file, or the size measured on this machine; infinity if unknown."""
    if listed_bytes is not None or is_remote(path):
        return math.inf if listed_bytes is None else listed_bytes
    return os.path.getsize(path) if os.path.isfile(path) else math.inf  # noqa: PTH202, PTH113 - as manifests have it


def list_shortfalls(config: PruneConfig, uncapped: Resources, plan: Resources, n_videos: int) -> Iterator[str]:
    """Yield a note for each option about workers that the cluster cannot satisfy, and one if shards became smaller.

    A smaller number of workers than requested is not reported if there are only so many videos. Both plans are
    results of ``plan_workers``.
    """
    for name, n_requested, n_planned in (
        ("decode-workers", config.decode_workers, plan.decode.workers),
        ("encode-workers", config.encode_workers, plan.encode.workers),
    ):
        if n_requested is not None and n_planned < min(n_requested, n_videos):
            yield f"the cluster fits only {n_planned} of --{name} {n_requested}"
    if plan.videos_per_shard < uncapped.videos_per_shard:
        yield f"shards get {plan.videos_per_shard} videos: more would not fit Ray's object stores"


MAX_TASK_BYTES = 2**28  # of a decode task with several videos
TASKS_PER_WORKER = 4  # decode tasks per worker that the remaining videos are divided into


def cut_tasks(
    videos: pa.Table, workers: int, max_videos: int, bundle: int = 1, row_group: int = 1, later_bytes: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of each decode task among ``videos`` (MANIFEST_SCHEMA), by their order and sizes alone.

    A task has at most about MAX_TASK_BYTES (a larger video is alone) and about ``max_videos`` videos, and whole
    batches. If possible it also has whole row groups. It takes about 1 / (TASKS_PER_WORKER * ``workers``) of the
    remaining bytes and videos, so tasks become smaller, and few videos wait for a slow worker at the end.

    Args:
        workers: the number of decoders.
        bundle: the number of videos in a batch.
        row_group: the rows in a row group of the tables that hold videos.
        later_bytes: the bytes of later videos, which are assumed to be of similar size.
    """
    n_videos = len(videos)
    ends = np.concatenate([[0], np.cumsum(pc.fill_null(videos["size"], 0).to_numpy())])
    heads = _find_group_starts(videos, row_group) if row_group > 1 else None
    start = 0
    share = TASKS_PER_WORKER * workers
    later_videos = later_bytes * n_videos // int(ends[-1]) if ends[-1] else 0  # tables do not state sizes
    while start < n_videos:
        max_bytes = min(MAX_TASK_BYTES, (ends[-1] - ends[start] + later_bytes) // share)
        by_bytes = int(np.searchsorted(ends, ends[start] + max_bytes, side="right")) - 1 - start
        length = max(1, min(by_bytes, max_videos, -(-(n_videos + later_videos - start) // share)))
        stop = start + -(-length // bundle) * bundle
        if heads is not None:  # end at the start of the last row group in the task, else of the next one
            later = heads[np.searchsorted(heads, start, side="right") :]
            n_before = int(np.searchsorted(later, stop, side="right"))
            stop = int(later[max(0, n_before - 1)]) if len(later) else n_videos
            stop = min(stop, start + max_videos)
        yield start, min(stop, n_videos)
        start = min(stop, n_videos)


def _find_group_starts(videos: pa.Table, row_group: int) -> NDArray[np.int64]:
    """Return the indices of the videos that begin a row group; a member of a tar or zip usually does."""
    offsets = pc.fill_null(videos["source_offset"], 0).to_numpy()
    groups = offsets // row_group
    new = (groups[1:] != groups[:-1]) | (offsets[1:] < offsets[:-1])
    return np.flatnonzero(np.concatenate([[True], new]))
