"""Messages as an OpenAI client writes them -> a prompt of cached tokens. Needs no vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gstep.backbones import ModelSource
from gstep.language import Prompt, PromptBuilder, Visual, prompt_builder
from pipeline.cache.method import declared_method
from pipeline.cache.reader import TokenCache
from pipeline.cache.reading import TokenOrder
from pipeline.errors import CorruptShard, RatioNotCached, UnknownVideo, UsageError
from pipeline.generate.held_videos import LastUsed, n_bytes, to_visual
from pipeline.generate.model import check_model, check_tokens
from pipeline.serve.links import SCHEME, CacheLink
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

_OPEN_AGAIN_S = 10.0  # seconds since the cache was opened last
_HELD_BYTES = 2**30  # of cached tokens that a server keeps for the questions to come


@dataclass(frozen=True)
class ServedCache:
    """What a server answers from; JSON-able.

    It travels in vLLM's own configuration, which vLLM logs: where objects are is in the environment.

    Attributes:
        cache: a folder or ``s3://bucket/prefix``.
        model: and its ``revision``: the argument of ModelSource.resolve.
        retention_ratio: of videos whose link says none; None is all that is stored.
        positions, rule, frame_times: as of prompt_builder.
    """

    cache: str
    model: str
    revision: str | None = None
    retention_ratio: float | None = None
    positions: str | None = None
    rule: str = "transformers-5"
    frame_times: str = "true"

    def open(self) -> TokenCache:
        """The cache. Raises NotACache, CorruptShard, OSError."""
        return TokenCache(self.cache, store=store_at(self.cache, Objects.from_environment()))


class CachedPrompts:
    """Prompts of one model about the videos of one cache. Threads may share it.

    Raises UsageError where the two do not go together, ModelError, NotACache, CorruptShard and OSError.
    """

    def __init__(self, served: ServedCache) -> None:
        self._served = served
        self._cache = served.open()
        self.source = ModelSource.resolve(served.model, served.revision)
        check_model(self._cache.store, self._cache.identity["model"], self.source)
        self.builder: PromptBuilder = prompt_builder(self.source, served.positions, served.rule, served.frame_times)
        check_tokens(self._cache.store, self._cache.header, self._cache.hidden_sizes, self.builder)
        #: The most visual tokens that a video of the cache has in a prompt.
        self.largest_video = self._cache.most_tokens + (1 if self.builder.needs_newline else 0)
        if served.retention_ratio is not None and served.retention_ratio > self._cache.retention_ratio + 1e-9:
            raise UsageError(
                f"--retention-ratio {served.retention_ratio:g}: the cache stores {self._cache.retention_ratio:g}"
            )
        declared = declared_method(self._cache.identity)
        reorders = declared is not None and declared.reorders
        self._order: TokenOrder = "selection" if reorders else "index"
        self._held: LastUsed[CacheLink, Visual] = LastUsed(_HELD_BYTES, n_bytes)
        self._lock = threading.Lock()
        self._opened_at = time.monotonic()

    def build(self, messages: Iterable[Mapping[str, Any]]) -> Prompt:
        """The prompt of a conversation, up to where the model is to speak.

        Raises ValueError for what is no cached video, not in the cache, or not what the model takes, with the reason.
        """
        read = [(_role(message), parts_of(message)) for message in messages]
        links = [CacheLink.parse(part["url"]) for _, parts in read for part in parts if "url" in part]
        told = [{"role": role, "content": [_for_template(part) for part in parts]} for role, parts in read]
        return self.builder.build_chat(told, self._visuals(links))

    def _visuals(self, links: Sequence[CacheLink]) -> list[Visual]:
        with self._lock:  # a cache reads for one at a time
            return [self._visual(link) for link in links]

    def _look_again(self, video_id: str) -> None:
        """For a video that was added since; not for every mistyped name, as this reads the whole index."""
        if video_id not in self._cache and time.monotonic() - self._opened_at > _OPEN_AGAIN_S:
            self._cache = self._served.open()
            self._opened_at = time.monotonic()

    def _visual(self, link: CacheLink) -> Visual:
        if (held := self._held.get(link)) is not None:
            return held
        ratio = link.retention_ratio if link.retention_ratio is not None else self._served.retention_ratio
        try:
            self._look_again(link.video_id)
            video = self._cache.get(link.video_id, ratio, self._order)
        except (UnknownVideo, RatioNotCached, CorruptShard) as error:
            raise ValueError(str(error)) from error
        return self._held.put(link, to_visual(video, self._cache.newline))


_NO_MORE = frozenset(("role", "content", "name"))
_ROLES = ("system", "developer", "user", "assistant")


def parts_of(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """The content of a message as ``{"text": ...}`` and ``{"url": ...}`` of a cached video.

    Raises ValueError for parts of any other kind: whatever is not named here would have to be read from somewhere.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [{"text": content}] if content else []
    return [_part(part) for part in content]


def _role(message: Mapping[str, Any]) -> str:
    """Raises ValueError for what a chat template would write and this does not look into: tools."""
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(f"a message of role {str(role)[:40]!r} cannot go with a cached video")
    if more := sorted(name for name in message.keys() - _NO_MORE if message[name]):
        raise ValueError(f"{more[0]} of a message cannot go with a cached video")
    return "system" if role == "developer" else str(role)


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
