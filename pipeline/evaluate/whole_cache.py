"""The cache of all tokens that an evaluation answers from: made with the protocol's frames, or there already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from gstep.backbones import ModelSource
from gstep.evidence import HEAD_SOURCES, pairs
from pipeline.cache.header import CacheIdentity
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.protocols import FrameRule, Protocol
from pipeline.execution.request import refusing, store_refusing
from pipeline.generate.late_pruning import LateAsked
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.prune.config import PruneConfig
from pipeline.prune.request import match_cache, needed_by, resolve, sampling_settings
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store
from pipeline.video.sampling import ROUND_EVEN, TRUNCATE, Sampling

#: The prunings under which every question is asked, by label; None is full retention.
Grid = Mapping[str, LateAsked | None]
_PASSED_ON = (
    *("revision", "dtype", "device", "attn", "min_gpus", "max_gpus", "wait", "join"),
    *("retry_failed", "max_attempts"),
    *("stall_timeout", "flush_seconds", "log_interval", "s3_endpoint", "s3_region"),
)


def videos_of(
    config: EvaluateConfig,
    grid: Grid,
    protocol: Protocol,
    source: ModelSource,
    cache: str,
    held: CacheIdentity | None,
) -> PruneConfig | None:
    """Return the options of the jobs.prune run that adds the missing videos to the cache of all tokens.

    It samples frames by the protocol and stores the evidence that the methods need. None where no videos are to be
    added to a cache that is there.
    """
    evidence = _evidence(grid, source, cache, held)
    heads = HEAD_SOURCES & {where for _, where in evidence}
    if config.siglip is not None and not heads:
        raise UsageError("--siglip: none of the methods takes anything from a SigLIP checkpoint")
    if config.data is None or (held is not None and heads and config.siglip is None):
        return None
    rules = protocol.rules(source.model_type)
    pixels = {} if rules.pixels is None else vars(rules.pixels)
    return PruneConfig(
        out=cache,
        video_root=[str(config.data), *config.video_root],
        on_forbidden="record",  # the benchmark has said already what is wrong with its videos
        model=source.name,
        pruner="none",
        retention_ratio=1.0,
        evidence=[f"{name}={where}" for name, where in sorted(evidence)],
        num_frames=config.num_frames or rules.frames.num_frames,
        frame_rule=frame_rule(rules.frames),
        **pixels,
        **passed_on(config, "siglip", "decode_timeout", "decode_workers", "encode_workers"),
    )


def passed_on(config: EvaluateConfig, *more: str) -> dict[str, Any]:
    """Return the options that a run takes over unchanged: those of encoding and of answering, and ``more``."""
    return {name: getattr(config, name) for name in (*_PASSED_ON, *more)}


def check_frames(
    config: EvaluateConfig, protocol: Protocol, source: ModelSource, cache: str, held: CacheIdentity
) -> None:
    """Raise UsageError if an existing cache was made with other frames than the protocol names."""
    asked = config.num_frames is not None or source.model_type in protocol.models
    if not asked or "sampling" not in held:
        return
    frames = protocol.rules(source.model_type).frames
    rule = frame_rule(frames)
    wanted = sampling_settings(Sampling(num_frames=config.num_frames or frames.num_frames, rule=rule))
    if wanted != held["sampling"]:
        raise IdentityMismatch(
            f"{cache} has the frames {held['sampling']}, and {protocol.name} asks for {wanted}: name another "
            "--cache, or its own number with --num-frames"
        )


def _evidence(grid: Grid, source: ModelSource, cache: str, held: CacheIdentity | None) -> frozenset[tuple[str, str]]:
    """Return the evidence that the methods need besides tokens; of an existing cache, the evidence it holds.

    Raises UsageError where that is less.
    """
    needed: dict[tuple[str, str], str] = {}
    with refusing():
        for one in grid.values():
            if one is not None:
                needed |= dict.fromkeys(needed_by(one.method, source.model_type, one.params), one.method)
    if held is None:
        return frozenset(needed)
    stored = pairs(held.get("evidence", {}))
    if missing := sorted(needed.keys() - stored):
        raise UsageError(
            f"{cache} holds no {' and '.join(name for name, _ in missing)} for {needed[missing[0]]}: name another "
            "place with --cache, where all tokens are made again with it; the answers that are there stay"
        )
    return stored


def frame_rule(rule: FrameRule) -> str:
    """Return a protocol's frame rule as jobs.prune names it. Raise UsageError if jobs.prune has no such rule."""
    names = {("truncate", False): TRUNCATE, ("round", True): ROUND_EVEN}
    if (rule.rounding, rule.even) not in names:
        raise UsageError(f"frames that are {rule} are not sampled here")
    return names[rule.rounding, rule.even]


def identity_of(videos: PruneConfig, cached: Store, objects: Objects, console: Console) -> CacheIdentity:
    """Return the identity that the cache has or will have. Raise IdentityMismatch if an existing cache differs."""
    job = resolve(videos, MANIFEST_SCHEMA.empty_table(), cached, objects)
    with store_refusing():
        job = match_cache(job, console)
    return job.identity("float32" if job.dtype == "auto" else job.dtype)
