"""Videos in, a Parquet cache of pruned visual tokens out; and the reader of that cache.

``prune_videos`` fills a cache, ``TokenCache`` reads it, ``answer_questions`` asks its language model; ``encode_video``
does one video without Ray or a cache. ``help`` of each says the rest. What ``__all__`` names is public, in this package
and in ``gstep``, ``gstep.language`` and ``gstep.backbones``; the rooms below are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.cache.cached_video import CachedVideo
    from pipeline.cache.reader import TokenCache
    from pipeline.datasets.dataset import IterableTokenDataset, TokenDataset
    from pipeline.datasets.packing import Packed, pack
    from pipeline.errors import (
        CorruptShard,
        EvidenceNotCached,
        FailedVideo,
        NotACache,
        RatioNotCached,
        RunFailed,
        TooManyFailed,
        UnknownVideo,
        UsageError,
        VideoFault,
    )
    from pipeline.execution.monitoring.load import Progress
    from pipeline.execution.token_source import ray_dataset
    from pipeline.generate.answers import read_answers
    from pipeline.generate.library import answer_questions
    from pipeline.generate.model import model_source
    from pipeline.generate.summary import AnswerSummary
    from pipeline.prune.library import prune_videos
    from pipeline.prune.map_batches import DecodeVideos, EncodeVideos, PruneStages, prune_stages
    from pipeline.prune.one_video import EncodedVideo, LocalEncoder, encode_video
    from pipeline.prune.summary import Summary
    from pipeline.serve.library import vllm_input, vllm_options

__all__ = [
    "AnswerSummary",
    "CachedVideo",
    "CorruptShard",
    "DecodeVideos",
    "EncodeVideos",
    "EncodedVideo",
    "EvidenceNotCached",
    "FailedVideo",
    "IterableTokenDataset",
    "LocalEncoder",
    "NotACache",
    "Packed",
    "Progress",
    "PruneStages",
    "RatioNotCached",
    "RunFailed",
    "Summary",
    "TokenCache",
    "TokenDataset",
    "TooManyFailed",
    "UnknownVideo",
    "UsageError",
    "VideoFault",
    "answer_questions",
    "encode_video",
    "model_source",
    "pack",
    "prune_stages",
    "prune_videos",
    "ray_dataset",
    "read_answers",
    "vllm_input",
    "vllm_options",
]

_HOMES = {
    "TokenCache": "pipeline.cache.reader",
    "CachedVideo": "pipeline.cache.cached_video",
    "IterableTokenDataset": "pipeline.datasets.dataset",
    "TokenDataset": "pipeline.datasets.dataset",
    "Packed": "pipeline.datasets.packing",
    "pack": "pipeline.datasets.packing",
    "ray_dataset": "pipeline.execution.token_source",
    "read_answers": "pipeline.generate.answers",
    "vllm_input": "pipeline.serve.library",
    "vllm_options": "pipeline.serve.library",
    "AnswerSummary": "pipeline.generate.summary",
    "DecodeVideos": "pipeline.prune.map_batches",
    "EncodeVideos": "pipeline.prune.map_batches",
    "EncodedVideo": "pipeline.prune.one_video",
    "LocalEncoder": "pipeline.prune.one_video",
    "PruneStages": "pipeline.prune.map_batches",
    "Progress": "pipeline.execution.monitoring.load",
    "Summary": "pipeline.prune.summary",
    "answer_questions": "pipeline.generate.library",
    "encode_video": "pipeline.prune.one_video",
    "model_source": "pipeline.generate.model",
    "prune_stages": "pipeline.prune.map_batches",
    "prune_videos": "pipeline.prune.library",
}


def __getattr__(name: str) -> Any:  # torch and pyarrow load when the reader is asked for, not with the package
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES.get(name, "pipeline.errors")), name)


def __dir__() -> list[str]:  # what a notebook completes
    return __all__
