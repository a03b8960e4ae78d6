"""Videos in, a Parquet cache of pruned visual tokens out; and the reader of that cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.cache.cached_video import CachedVideo
    from pipeline.cache.reader import TokenCache
    from pipeline.datasets.dataset import IterableTokenDataset, TokenDataset
    from pipeline.datasets.packing import Packed, pack
    from pipeline.errors import CorruptShard, EvidenceNotCached, FailedVideo, NotACache, RatioNotCached, UnknownVideo
    from pipeline.execution.token_source import ray_dataset
    from pipeline.generate.answers import read_answers
    from pipeline.serve.library import vllm_input, vllm_options

__all__ = [
    "CachedVideo",
    "CorruptShard",
    "EvidenceNotCached",
    "FailedVideo",
    "IterableTokenDataset",
    "NotACache",
    "Packed",
    "RatioNotCached",
    "TokenCache",
    "TokenDataset",
    "UnknownVideo",
    "pack",
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
}


def __getattr__(name: str) -> Any:  # torch and pyarrow load when the reader is asked for, not with the package
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES.get(name, "pipeline.errors")), name)
