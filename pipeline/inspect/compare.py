"""``pipeline.compare``: the tokens that several methods keep of one video, all from one encoding of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gstep.backbones import ModelSource, family_of
from gstep.pruners.base import Pruner
from pipeline.cache.header import HEADER
from pipeline.cache.reader import TokenCache
from pipeline.errors import UsageError, usage_errors
from pipeline.inputs.listings import VIDEO_SUFFIXES, find_suffix
from pipeline.inputs.manifest import sort_roots
from pipeline.inspect.compare_cached import DEFAULT_RATIO, CachedComparison
from pipeline.inspect.comparison import Comparison
from pipeline.inspect.selecting import compare_frames, list_wanted, load_encoder, plan_encoding
from pipeline.options import check_ratio, make_config
from pipeline.prune.config import ENCODING_OPTIONS, PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.one_video import decode_file
from pipeline.rows import VIDEO_COLUMNS, VideoRow
from pipeline.storage.arrow import SCHEMES
from pipeline.storage.s3 import Objects, is_s3
from pipeline.storage.stores import store_at
from pipeline.video.sandbox import InThisProcess

#: The options among ENCODING_OPTIONS that go with a video of a cache: its frames, sizes and precision are the cache's.
CACHE_OPTIONS = frozenset(
    {"model", "revision", "family", "siglip", "device", "attn", "seed", "fetch_memory"}
    | {"s3_endpoint", "s3_requester_pays"}
)
_DEFAULT_METHODS = ("gstep",)  # as jobs.prune


def compare(
    video: str | os.PathLike[str] | TokenCache,
    video_id: str | None = None,
    *,
    methods: str | Pruner | Sequence[str | Pruner] | None = None,
    retention_ratios: float | Sequence[float] | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    video_roots: Sequence[str] = (),
    **options: Any,
) -> Comparison:
    """Show which tokens of one video several methods keep; a notebook displays the result as a page of its frames.

    >>> pipeline.compare("bikes.mp4", methods=["gstep", "vidcom2", "random,seed=1"], retention_ratios=[0.25, 0.10])
    >>> pipeline.compare("cache", "bikes.mp4", methods=["gstep", "random"], video_roots=["videos"]).save("page.html")
    >>> pipeline.compare("cache", "bikes.mp4")  # what the cache holds

    All selections are of one encoding of the video, and are those that ``python -m jobs.prune`` would cache. The
    selections of a cached video are computed from its stored tokens if the cache holds all of them as the encoder gave
    them, with the evidence that the methods need. They are read as they are stored if the cache's own method is the
    only one that is asked for. Else the source is encoded again, by the model and with the frames of the cache.

    Args:
        video: a video file, local or on S3, which is decoded in this process; or a cache.
        video_id: the video of the cache. For a file: its name in the result, by default that of the file.
        methods: one or several, each ``METHOD`` or ``METHOD,NAME=VALUE,...`` as ``python -m jobs.evaluate --method``
            takes it, such as ``random,seed=0..2``; or a Pruner object. None is the method of the cache, or gstep for a
            file.
        retention_ratios: one or several shares of the tokens to keep; None is what the cache stores, or 0.25.
        start_s, end_s: the clip of a file, in seconds.
        video_roots: folders and prefixes below which the sources that a cache names may be read.
        options: the options of ``python -m jobs.prune --help-all`` about one video: ``model``, ``num_frames``, ``fps``,
            ``device`` and so on. A cache has its own frames: with it, options about frames are refused.

    Raises:
        UsageError: an option, a method or a ratio cannot be used, or a cache holds too few tokens for the methods and
            its source cannot be encoded again; the message has the remedy.
        VideoFault: the video cannot be read, or a method cannot prune it.
        UnknownVideo: the cache has no tokens of the video.
        RatioNotCached: without methods, a ratio that the cache does not serve.
        MethodFails: your own method fails for every video.
    """
    config = make_config(PruneConfig, "compare", options, ENCODING_OPTIONS)
    methods = [methods] if isinstance(methods, str | Pruner) else methods
    named = [retention_ratios] if isinstance(retention_ratios, float | int) else list(retention_ratios or ())
    ratios = [float(ratio) for ratio in named]
    for ratio in ratios:
        check_ratio("retention_ratio", ratio)
    objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
    cache = _open_cache(video, objects)
    if cache is None:
        assert not isinstance(video, TokenCache)
        if video_roots:
            raise UsageError(f"{os.fspath(video)} is no cache: --video-root goes with a cache, whose sources it allows")
        methods, ratios = methods or _DEFAULT_METHODS, ratios or [DEFAULT_RATIO]
        return _compare_file(os.fspath(video), video_id, methods, ratios, config, objects, start_s, end_s)
    if video_id is None:
        raise UsageError(f"{cache.store} is a cache: name one of its videos")
    if misplaced := sorted(options.keys() - CACHE_OPTIONS):
        raise UsageError(
            f"{', '.join(misplaced)}: a video of a cache has the frames and the precision of the cache; name the video "
            "file instead of the cache to choose them"
        )
    if (start_s, end_s) != (None, None):
        raise UsageError("start_s and end_s: a video of a cache is the clip that was cached")
    roots = sort_roots(video_roots)
    return CachedComparison(cache, video_id, config, objects, roots, "model" in options).compare(methods, ratios)


def _open_cache(video: str | os.PathLike[str] | TokenCache, objects: Objects) -> TokenCache | None:
    """Return the cache that ``video`` is or names; None for a video file, and for a folder without a cache."""
    if isinstance(video, TokenCache):
        return video
    text = os.fspath(video)
    is_prefix = text.startswith((*SCHEMES, "file:///")) or (is_s3(text) and find_suffix(text) not in VIDEO_SUFFIXES)
    if not (is_prefix or Path(text).is_dir()):
        return None
    store = store_at(text, objects)
    return TokenCache(text, store=store) if store.exists(HEADER) else None


def _compare_file(
    path: str,
    name: str | None,
    methods: Sequence[str | Pruner],
    ratios: Sequence[float],
    config: PruneConfig,
    objects: Objects,
    start_s: float | None,
    end_s: float | None,
) -> Comparison:
    """Encode a video file, and compare the methods on it."""
    with usage_errors():
        source = ModelSource.resolve(config.model, config.revision, quantized=True, family=config.family)
    wanted = list_wanted(methods, ratios, config.seed, family_of(source).variant)
    recipe = plan_encoding(config, source, wanted, objects)
    record, frames = decode_file(VideoDecoder(recipe.decode_setup(), InThisProcess()), path, start_s, end_s)
    row: VideoRow = {**dict.fromkeys(VIDEO_COLUMNS), **record, "video_id": name or Path(path).name}  # type: ignore[typeddict-item]
    return compare_frames(load_encoder(recipe, config.device, config.dtype), recipe, row, record, frames, wanted)
