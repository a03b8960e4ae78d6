"""Messages as an OpenAI client writes them -> a prompt of cached tokens. Needs no vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from gstep.backbones import ModelSource
from gstep.language import Prompt, PromptBuilder, Visual, prompt_builder
from pipeline.cache.live_rows import INDEX_COLUMNS, read_live
from pipeline.cache.method import declared_method
from pipeline.cache.reader import TokenCache, TokenOrder, read_header
from pipeline.errors import CorruptShard, RatioNotCached, UnknownVideo, UsageError
from pipeline.generate.held_videos import LastUsed, n_bytes, to_visual
from pipeline.generate.model import check_model, check_tokens
from pipeline.serve.links import SCHEME, CacheLink
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

COLUMNS = (*INDEX_COLUMNS, "hidden_size", "n_tokens")  # of the index of the cache
_HELD_BYTES = 2**30  # of cached tokens that a server keeps for the questions to come


@dataclass(frozen=True)
class ServedCache:
    """What a server answers from; JSON-able, for it travels in vLLM's own configuration, which vLLM logs: where objects
    are is in the environment.

    Attributes:
        cache: a folder or ``s3://bucket/prefix``.
        model: and its ``revision``: the argument of ModelSource.resolve.
        retention_ratio: of videos whose link says none; None is all that is stored.
        positions, rule, frame_times: as of prompt_builder.
        own_order: whether a method's own order in a prompt is kept.
    """

    cache: str
    model: str
    revision: str | None = None
    retention_ratio: float | None = None
    positions: str | None = None
    rule: str = "transformers-5"
    frame_times: str = "true"
    own_order: bool = True

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def open(self) -> tuple[TokenCache, pa.Table]:
        """The cache, and the live rows of its videos: COLUMNS. Raises NotACache, CorruptShard, OSError."""
        store = store_at(self.cache, Objects.from_environment())
        read_header(store)
        live = read_live(store, COLUMNS)
        return TokenCache(self.cache, store=store, live=live), live


class CachedPrompts:
    """Prompts of one model about the videos of one cache. Threads may share it.

    Raises UsageError where the two do not go together, ModelError, NotACache, CorruptShard and OSError.
    """

    def __init__(self, served: ServedCache) -> None:
        self._served = served
        self._cache, live = served.open()
        self.source = ModelSource.resolve(served.model, served.revision)
        check_model(self._cache.store, self._cache.identity["model"], self.source)
        self.builder: PromptBuilder = prompt_builder(self.source, served.positions, served.rule, served.frame_times)
        check_tokens(self._cache.store, self._cache.header, live, self.builder)
        most = pc.max(live["n_tokens"]).as_py() or 0
        #: The most visual tokens that a video of the cache has in a prompt.
        self.largest_video = most + (1 if self.builder.needs_newline else 0)
        if served.retention_ratio is not None and served.retention_ratio > self._cache.retention_ratio + 1e-9:
            raise UsageError(
                f"--retention-ratio {served.retention_ratio:g}: the cache stores {self._cache.retention_ratio:g}"
            )
        declared = declared_method(self._cache.identity)
        reorders = declared is not None and declared.reorders and served.own_order
        self._order: TokenOrder = "selection" if reorders else "index"
        self._held: LastUsed[CacheLink, Visual] = LastUsed(_HELD_BYTES, n_bytes)
        self._lock = threading.Lock()

    def build(self, messages: Iterable[Mapping[str, Any]]) -> Prompt:
        """The prompt of a conversation, up to where the model is to speak.

        Raises ValueError for what is no cached video, not in the cache, or not what the model takes, with the reason.
        """
        plain = [{"role": message["role"], "content": parts_of(message)} for message in messages]
        links = [CacheLink.parse(part["url"]) for message in plain for part in message["content"] if "url" in part]
        told = [{**message, "content": [_for_template(part) for part in message["content"]]} for message in plain]
        return self.builder.build_chat(told, self._visuals(links))

    def _visuals(self, links: Sequence[CacheLink]) -> list[Visual]:
        with self._lock:  # a cache reads for one at a time
            return [self._visual(link) for link in links]

    def _visual(self, link: CacheLink) -> Visual:
        if (held := self._held.get(link)) is not None:
            return held
        ratio = link.retention_ratio if link.retention_ratio is not None else self._served.retention_ratio
        try:
            if link.video_id not in self._cache:
                self._cache, _ = self._served.open()  # videos that were added since
            video = self._cache.get(link.video_id, ratio, self._order)
        except (UnknownVideo, RatioNotCached, CorruptShard) as error:
            raise ValueError(str(error)) from error
        return self._held.put(link, to_visual(video, self._cache.newline))


def parts_of(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """The content of a message as ``{"text": ...}`` and ``{"url": ...}`` of a cached video.

    Raises ValueError for parts of any other kind: whatever is not named here would have to be read from somewhere.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [{"text": content}] if content else []
    return [_part(part) for part in content]


def _part(part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"text": part}
    kind = part.get("type")
    if kind == "text":
        return {"text": str(part["text"])}
    if kind == "video_url":
        link = part["video_url"]
        return {"url": str(link["url"] if isinstance(link, Mapping) else link)}
    raise ValueError(f"a part of type {str(kind)[:40]!r}: this server takes text, and video_url with {SCHEME}VIDEO_ID")


def _for_template(part: Mapping[str, str]) -> dict[str, str]:
    return {"type": "video"} if "url" in part else {"type": "text", "text": part["text"]}
