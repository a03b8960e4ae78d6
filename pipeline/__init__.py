"""Videos in, a Parquet cache of pruned visual tokens out; and the reader of that cache.

``prune_videos`` fills a cache, ``TokenCache`` reads it, ``answer_questions`` asks its language model. ``encode_video``
does one video without Ray or a cache, and ``compare`` shows what several methods keep of it. What ``__all__`` names is
public, in this package and in ``gstep``, ``gstep.language`` and ``gstep.backbones``; the packages below are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gstep.lazy import LazyTable, make_getattr

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
    from pipeline.generate.answers import read_answers
    from pipeline.generate.model import model_source
    from pipeline.generate.run import answer_questions
    from pipeline.generate.summary import AnswerSummary
    from pipeline.inspect.compare import compare
    from pipeline.inspect.comparison import Comparison, MethodSelection
    from pipeline.prune.map_batches import DecodeVideos, EncodeVideos, prune_stages
    from pipeline.prune.one_video import EncodedVideo, LocalEncoder, encode_video
    from pipeline.prune.recipe import PruneStages
    from pipeline.prune.run import prune_videos
    from pipeline.prune.summary import Summary
    from pipeline.runner.progress import Progress
    from pipeline.runner.token_source import ray_dataset
    from pipeline.serve.library import vllm_input, vllm_options

__all__ = [
    "AnswerSummary",
    "CachedVideo",
    "Comparison",
    "CorruptShard",
    "DecodeVideos",
    "EncodeVideos",
    "EncodedVideo",
    "EvidenceNotCached",
    "FailedVideo",
    "IterableTokenDataset",
    "LocalEncoder",
    "MethodSelection",
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
    "compare",
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
    "pipeline.cache.cached_video": ("CachedVideo",),
    "pipeline.cache.reader": ("TokenCache",),
    "pipeline.datasets.dataset": ("IterableTokenDataset", "TokenDataset"),
    "pipeline.datasets.packing": ("Packed", "pack"),
    "pipeline.errors": (
        *("CorruptShard", "EvidenceNotCached", "FailedVideo", "NotACache", "RatioNotCached", "RunFailed"),
        *("TooManyFailed", "UnknownVideo", "UsageError", "VideoFault"),
    ),
    "pipeline.runner.progress": ("Progress",),
    "pipeline.runner.token_source": ("ray_dataset",),
    "pipeline.generate.answers": ("read_answers",),
    "pipeline.generate.run": ("answer_questions",),
    "pipeline.generate.model": ("model_source",),
    "pipeline.inspect.compare": ("compare",),
    "pipeline.inspect.comparison": ("Comparison", "MethodSelection"),
    "pipeline.generate.summary": ("AnswerSummary",),
    "pipeline.prune.run": ("prune_videos",),
    "pipeline.prune.map_batches": ("DecodeVideos", "EncodeVideos", "prune_stages"),
    "pipeline.prune.recipe": ("PruneStages",),
    "pipeline.prune.one_video": ("EncodedVideo", "LocalEncoder", "encode_video"),
    "pipeline.prune.summary": ("Summary",),
    "pipeline.serve.library": ("vllm_input", "vllm_options"),
}
# torch and pyarrow load when the reader is asked for, not with the package.
_PUBLIC = LazyTable("name", {name: f"{module}:{name}" for module, names in _HOMES.items() for name in names})

if not TYPE_CHECKING:  # hidden from type checkers: to them every unknown attribute would look like a valid one
    __getattr__ = make_getattr(__name__, _PUBLIC)


def __dir__() -> list[str]:  # what a notebook completes
    return __all__
