"""Messages as an OpenAI client writes them -> a prompt of cached tokens; vLLM is not needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote

from gstep.backbones import ModelSource
from gstep.language import Prompt, PromptBuilder, prompt_builder
from gstep.language.types import ChatContent, ChatMessage
from pipeline.cache.header import get_method_declarations
from pipeline.cache.reader import TokenCache
from pipeline.errors import UsageError
from pipeline.generate.model import check_model, check_tokens, read_tower_hash, refuse_vllm
from pipeline.rows import Json, JsonObject
from pipeline.serve import CONFIG
from pipeline.serve.videos import ServedVideo, ServedVideos, TooLarge
from pipeline.storage.stores import store_at

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ClientMessage = JsonObject
SCHEME = "cache://"
_RATIO = "retention_ratio"
_CACHE = "cache"
_CHARACTERS_PER_TOKEN = 8  # the highest average of a text that may fit; ordinary text has four


@dataclass(frozen=True)
class CacheLink:
    """A parsed link ``cache://VIDEO_ID?retention_ratio=R&cache=NAME`` to a cached video.

    Attributes:
        retention_ratio: None uses the server's.
        cache: the name of the cache; "" is the first cache.
    """

    video_id: str
    retention_ratio: float | None = None
    cache: str = ""

    @classmethod
    def parse(cls, url: str) -> CacheLink:
        """Parse a link; its id is percent-decoded, so that ids may contain ``?`` and ``%``.

        Raises:
            ValueError: another scheme, no id, or an unknown, repeated or invalid option.
        """
        if not url.startswith(SCHEME):
            raise ValueError(
                f"{url[:80]!r} is not a cached video: this server reads {SCHEME}VIDEO_ID?{_RATIO}=R, no files and no "
                "addresses"
            )
        name, _, query = url.removeprefix(SCHEME).partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        options = dict(pairs)
        if unknown := sorted(options.keys() - {_RATIO, _CACHE}):
            raise ValueError(f"{url[:200]!r}: unknown option {unknown[0]!r}; known: {_RATIO}, {_CACHE}")
        if len(options) < len(pairs):
            raise ValueError(f"{url[:200]!r} says an option twice")
        if not name:
            raise ValueError(f"{url[:200]!r} names no video")
        return cls(unquote(name), _parse_ratio(options[_RATIO]) if _RATIO in options else None, options.get(_CACHE, ""))


def _parse_ratio(text: str) -> float:
    """Parse a ratio. Raises ValueError if it is not a number in (0, 1]."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{_RATIO} must be in (0, 1], got {text[:40]!r}")
    return ratio


@dataclass(frozen=True)
class ServedCache:
    """The settings of a server on caches, JSON-able.

    They are passed in vLLM's configuration, which vLLM logs, so credentials and endpoints stay in the environment.

    Attributes:
        cache: the first cache: a folder or ``s3://bucket/prefix``.
        model, revision: the arguments of ModelSource.resolve.
        others: (name, location) of further caches, which links name by ``?cache=NAME``.
        retention_ratio: for links without a ratio; None is all that is stored.
        positions, rule, frame_times: the arguments of prompt_builder.
        refresh_seconds: the interval at which the videos tables are read again.
        held_bytes: the bytes of tokens kept in memory.
    """

    cache: str
    model: str
    revision: str | None = None
    others: Sequence[tuple[str, str]] = ()
    retention_ratio: float | None = None
    positions: str | None = None
    rule: str = "transformers-5"
    frame_times: str = "true"
    refresh_seconds: float = 10.0
    held_bytes: int = 2**30

    @classmethod
    def from_config(cls, config: VllmConfig) -> ServedCache:
        """Create the settings from vLLM's configuration."""
        values = config.additional_config[CONFIG]
        return cls(**{**values, "others": tuple((name, place) for name, place in values["others"])})


class Conversation(NamedTuple):
    """A parsed conversation: messages for the chat template, links in order, and the length of the texts."""

    messages: list[ChatMessage]
    links: list[CacheLink]
    n_characters: int


class CachedPrompts:
    """The maker of prompts about videos of the served caches, for one model; thread-safe.

    Attributes:
        caches: name -> the videos of each cache; "" is the first cache.
        largest_video: the maximum number of visual tokens of a cached video in a prompt.
    """

    def __init__(self, config: ServedCache) -> None:
        """Open all caches and check that they fit the model; a thread per cache refreshes it until ``close``.

        Raises:
            UsageError: a cache does not exist, was made with another model, or cannot serve the ratio.
            ModelError: there is no such checkpoint, or it cannot be used.
        """
        self.served = config
        self.source = ModelSource.resolve(config.model, config.revision, quantized=True)
        self.builder: PromptBuilder = prompt_builder(self.source, config.positions, config.rule, config.frame_times)
        places = {"": config.cache, **dict(config.others)}
        self.caches = {name: self._open_cache(place) for name, place in places.items()}
        self.largest_video = max(videos.cache.max_tokens for videos in self.caches.values())
        self.largest_video += 1 if self.builder.needs_newline else 0

    def _open_cache(self, place: str) -> ServedVideos:
        """Open a cache, check that it fits the model and the server's ratio, and start the thread that refreshes it."""
        # If the store does not answer, a request gets its 503 soon instead of after minutes.
        open_token_cache = partial(TokenCache, place, store=store_at(place).with_short_timeouts())
        first = open_token_cache()
        model = first.identity["model"]
        refuse_vllm(model)
        check_model(first.store, model, self.source, partial(read_tower_hash, first.store, first.header))
        check_tokens(first.store, first.header, first.hidden_sizes, self.builder)
        _check_ratio(first, self.served.retention_ratio)
        return ServedVideos(open_token_cache, self.served.refresh_seconds, self.served.held_bytes)

    def close(self) -> None:
        """Stop refreshing the caches, and start no further reads."""
        for videos in self.caches.values():
            videos.close()

    def read(self, messages: Iterable[ClientMessage]) -> Conversation:
        """Parse messages, without tokenizing them or looking up the videos of their links.

        Raises:
            ValueError: a link is malformed, a role or content is not supported, or the texts are too long.
        """
        parsed_messages = [(_parse_role(message), parse_content(message)) for message in messages]
        links = [CacheLink.parse(part["url"]) for _, parts in parsed_messages for part in parts if "url" in part]
        chat = [
            ChatMessage(role=role, content=[_convert_for_template(part) for part in parts])
            for role, parts in parsed_messages
        ]
        n_characters = sum(len(part.get("text", "")) for _, parts in parsed_messages for part in parts)
        self.check_length(n_characters)
        return Conversation(chat, links, n_characters)

    def check_length(self, n_characters: int) -> None:
        """Raise ValueError if texts of ``n_characters`` in total are too long for any prompt of the model.

        The limit is ``_CHARACTERS_PER_TOKEN`` characters per token of the model's context.
        """
        max_characters = _CHARACTERS_PER_TOKEN * self.builder.context_length
        if n_characters > max_characters:
            raise ValueError(
                f"the messages have {n_characters:,} characters; this server takes {max_characters:,}, as a prompt of "
                f"this model has at most {self.builder.context_length:,} tokens"
            )

    def find(self, link: CacheLink) -> Future[ServedVideo]:
        """Return a future of the linked video, done if memory has it as of the last refresh.

        A link without a ratio gets the server's ratio.

        Raises:
            ValueError: the server has no cache of this name.
        """
        if link.cache not in self.caches:
            names = ", ".join(filter(None, self.caches)) or "none"
            raise ValueError(f"this server has no cache {link.cache[:80]!r}; by name it has {names}")
        ratio = link.retention_ratio if link.retention_ratio is not None else self.served.retention_ratio
        return self.caches[link.cache].find(link.video_id, ratio)

    def prompt(self, conversation: Conversation, videos: Sequence[ServedVideo], max_tokens: float = math.inf) -> Prompt:
        """Build the prompt of a conversation, up to the model's next message.

        Args:
            videos: those of the conversation's links, in their order.
            max_tokens: the visual tokens that a video may have in a prompt.

        Raises:
            TooLarge: a video has more tokens than that.
            ValueError: a text is not valid, or the chat template does not write every video and text.
        """
        for link, video in zip(conversation.links, videos, strict=True):
            if (n_tokens := self.builder.n_visual([video.visual])) > max_tokens:
                raise TooLarge(
                    f"{link.video_id!r} has {n_tokens:,} tokens in a prompt, but this server has memory for "
                    f"{max_tokens:,}: restart the server (with --max-tokens-per-video for later videos), or ask for a "
                    f"smaller {_RATIO}"
                )
        return self.builder.build_chat(conversation.messages, [video.visual for video in videos])


def _check_ratio(cache: TokenCache, ratio: float | None) -> None:
    """Raise UsageError if the cache cannot serve the ratio: it is above the stored one, or the method is not nested.

    None and the stored ratio always pass, and smaller ones for a method whose declarations are not known.
    """
    stored_ratio = cache.retention_ratio
    method = get_method_declarations(cache.identity)
    if ratio is None or abs(ratio - stored_ratio) <= 1e-9:
        return
    if ratio > stored_ratio:
        raise UsageError(f"--retention-ratio {ratio:g}: the cache stores {stored_ratio:g}")
    if method is not None and not method.nested:
        raise UsageError(
            f"--retention-ratio {ratio:g}: {cache.identity['pruner']['method']}, which pruned {cache.store}, has no "
            f"order of selection, so only {stored_ratio:g} can be served"
        )


@lru_cache(maxsize=1)
def get_cached_prompts(config: ServedCache) -> CachedPrompts:
    """Return the CachedPrompts of this process; the first call opens the caches."""
    return CachedPrompts(config)


_NO_MORE = frozenset(("role", "content", "name", "type"))
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("text", "input_text", "output_text")  # the last two occur in /v1/responses


def parse_content(message: ClientMessage) -> list[dict[str, str]]:
    """Return the content of a message as ``{"text": ...}`` and ``{"url": ...}``; empty content gives [].

    URLs are not checked.

    Raises:
        ValueError: a part is neither text nor a video (an image, for example), or it has no text or URL.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [{"text": content}] if content else []
    if not isinstance(content, Sequence):
        raise ValueError("the content of a message is a text, or a list of parts")
    try:
        return [_parse_content_part(part) for part in content]
    except KeyError as error:
        raise ValueError(f"a part of a message lacks its {error}") from None


def _parse_role(message: ClientMessage) -> str:
    """Return a message's role, with "system" for "developer".

    Raises:
        ValueError: the role is not system, developer, user or assistant, or a field other than role, content, name and
            type is set (None, "", [] and other false values pass).
    """
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(f"a message of role {str(role)[:40]!r} cannot go with a cached video")
    if extra_fields := sorted(name for name in message.keys() - _NO_MORE if message[name]):
        raise ValueError(f"{extra_fields[0]} of a message cannot go with a cached video")
    return "system" if role == "developer" else str(role)


def _parse_content_part(part: Json) -> dict[str, str]:
    """Return a part of a message, or a plain text, as {"text": ...} or {"url": ...}.

    Raises:
        ValueError: the part is neither a text nor a video (``video_url``, or ``input_file`` with ``file_url``).
        KeyError: the part lacks its text or url.
    """
    if isinstance(part, str):
        return {"text": part}
    if not isinstance(part, Mapping):
        raise ValueError("a part of a message is a text or an object")
    kind = part.get("type")
    if kind in _TEXTS:
        return {"text": str(part["text"])}
    if kind == "video_url":
        link = part["video_url"]
        return {"url": str(link["url"] if isinstance(link, Mapping) else link)}
    if kind == "input_file" and part.get("file_url"):  # /v1/responses has no type for videos
        return {"url": str(part["file_url"])}
    raise ValueError(f"a part of type {str(kind)[:40]!r}: this server takes text, and video_url with {SCHEME}VIDEO_ID")


def _convert_for_template(part: Mapping[str, str]) -> ChatContent:
    """Convert a part to the form of chat templates."""
    return {"type": "video"} if "url" in part else {"type": "text", "text": part["text"]}
