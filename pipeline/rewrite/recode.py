"""The tokens of a cache by another codec, without a video."""

from __future__ import annotations

from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.reader import TokenCache, coded_header
from pipeline.cache.writer import PrunedVideo
from pipeline.errors import UsageError
from pipeline.rewrite.rewrite import Rewrite, config_of, kept_of
from pipeline.rows import VideoRecord


def check_source(cache: TokenCache, why: str) -> None:
    """Raise UsageError where a cache does not hold what the encoder gave."""
    if cache.codec is not BFLOAT16:
        raise UsageError(
            f"{cache.store} holds tokens as {cache.codec.name} already: {why} the cache of bfloat16 tokens that it was "
            "made of"
        )


def recoding(source: TokenCache, codec: str, out: str) -> Rewrite:
    """Plan the cache ``out`` of the source's tokens by another codec. Raises UsageError."""
    check_source(source, "recode")
    config = {**config_of(source.store), "out": out, "token_codec": codec}
    labels = tuple(source.evidence)
    return Rewrite(source, coded_header(source.header, codec), config, "selection", labels, _unchanged)


def _unchanged(video: CachedVideo, record: VideoRecord) -> PrunedVideo:
    """Take a video as it is; writing codes it."""
    return PrunedVideo(record, kept_of(video))
