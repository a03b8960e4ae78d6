"""A question and the cached tokens of its videos -> token ids and positions; no weights are needed."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.language.types import ChatMessage, ChatPart, Prompt, PromptPolicy, placeholder_of
from gstep.types import Visual

# A noncharacter, which breaks up a placeholder that a text holds: its two pieces are tokenized as text.
_MARK = "\U0010fffe"
_OPEN_TAG = re.compile(r"(<\w+>)\s*\Z")


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of a prompt.

    Attributes:
        ids: [n] int64.
        positions: [A,n] int64, counted from the start of the segment.
        extent: how far the next segment starts behind this one's start.
        video: whose visual tokens these are placeholders for; None of a text.
    """

    ids: Tensor
    positions: Tensor
    extent: int
    video: int | None = None


class PromptBuilder(ABC):
    """The builder of one model's prompts under one policy. Pickles.

    Attributes:
        placeholder_id: the token that stands for a visual token (or newline).
    """

    default_positions: ClassVar[str]
    axes: ClassVar[int]
    needs_newline: ClassVar[bool] = False
    writes_times: ClassVar[bool] = False  # whether the prompt tells when frames are shown
    frame_markers: ClassVar[int] = 0  # tokens before and after the placeholders of each frame
    deepstack_levels: int = 0

    def __init__(self, config: Any, tokenizer: Any, chat_template: str, policy: PromptPolicy) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.policy = policy
        self.placeholder_id = placeholder_of(config)[1]
        self._video_token, self._image_token = (
            str(tokenizer.convert_ids_to_tokens(i)) for i in (self.placeholder_id, int(config.image_token_id))
        )

    @classmethod
    def of(cls, source: ModelSource, positions: str | None, rule: str, frame_times: str, thought: str = "open") -> Self:
        """Make the builder from a checkpoint's own files.

        Raises ModelError where one is missing, ValueError for an unknown policy.
        """
        template = chat_template(source)
        hashed = hashlib.sha256(template.encode()).hexdigest()[:16]
        policy = PromptPolicy(positions or cls.default_positions, rule, hashed, frame_times, thought)
        if not cls.writes_times:  # what changes no prompt must not tell answers apart
            policy = replace(policy, frame_times="true")
        config, tokenizer = source.stock_config(), tokenizer_of(source)
        placeholder = placeholder_of(config)[1]
        if tokenizer.convert_ids_to_tokens(placeholder) not in tokenizer.get_added_vocab():
            raise ModelError(
                f"{source.name!r}: config.json says that token {placeholder} stands for a video, but it is "
                "no special token of the tokenizer: download the whole checkpoint"
            )
        builder = cls(config, tokenizer, template, policy)
        if thought == "closed" and not builder.open_tag:
            builder.policy = replace(policy, thought="open")
        return builder

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def hidden_size(self) -> int:
        """D, the width of a visual token."""
        return int(self.config.get_text_config().hidden_size)

    def n_visual(self, visuals: Sequence[Visual]) -> int:
        """Count the placeholders that the videos take in a prompt."""
        return sum(len(v.index) for v in visuals) + (len(visuals) if self.needs_newline else 0)

    def build(self, text: str, visuals: Sequence[Visual], system: str | None = None) -> Prompt:
        """Build the prompt of one user message: the videos, then the text, as the checkpoint's chat template puts them.

        Args:
            system: a system message; None leaves it to the template.

        The model's own placeholder of an image or video is text like any other where the text holds it.

        Raises ValueError where a video comes without what the family needs.
        """
        content: list[ChatPart] = [*[ChatPart(type="video")] * len(visuals), {"type": "text", "text": text}]
        messages: list[ChatMessage] = [{"role": "user", "content": content}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        return self.build_chat(messages, visuals)

    def build_chat(self, messages: Sequence[ChatMessage], visuals: Sequence[Visual]) -> Prompt:
        """Build the prompt of a conversation, as the chat template puts it, up to where the model is to speak.

        Args:
            visuals: of the videos, in their order.

        Raises ValueError as :meth:`build`.
        """
        for visual in visuals:
            self.check(visual)
        rendered = self._render(messages, len(visuals))
        parts = self._with_markers(rendered.split(self._video_token), visuals)
        segments = list(self._segments(parts, visuals))
        starts = accumulate((segment.extent for segment in segments), initial=0)
        places = _places(segments)
        return Prompt(
            input_ids=torch.cat([segment.ids for segment in segments]),
            positions=torch.cat([s.positions + start for s, start in zip(segments, starts, strict=False)], dim=1),
            visuals=tuple(visuals),
            prefix_length=places[-1][1] if places else 0,
            spans=tuple((first - self.frame_markers, end + self.frame_markers) for first, end in places),
        )

    def check(self, visual: Visual) -> None:
        """Raise ValueError where the cached tokens are not what this model takes."""
        if visual.tokens.shape[1] != self.hidden_size:
            raise ValueError(f"visual tokens of width {visual.tokens.shape[1]}; this model takes {self.hidden_size}")
        if len(visual.deepstack) != self.deepstack_levels:
            raise ValueError(
                f"{len(visual.deepstack)} deepstack levels in the cache; this model takes {self.deepstack_levels}"
            )
        if self.needs_newline and visual.newline is None:
            raise ValueError("the newline row of this model is missing from the cache")

    @abstractmethod
    def _visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        """Return the placeholders and positions of a whole video, or of one frame where each has a placeholder."""

    def _with_markers(self, parts: list[str], visuals: Sequence[Visual]) -> list[tuple[str, int, int | None]]:
        """Return (text, video, frame) parts: the text before each placeholder, and the video (and frame) it stands for.

        A frame of None means all frames of the video.
        """
        return [(part, video, None) for video, part in enumerate(parts)]

    def _segments(self, parts: list[tuple[str, int, int | None]], visuals: Sequence[Visual]) -> Iterator[Segment]:
        """Yield the text before each placeholder, the visual tokens it stands for, and the text at the end."""
        for text, video, frame in parts:
            if text:
                yield self._text_segment(text)
            if video < len(visuals):
                yield replace(self._visual_segment(visuals[video], frame), video=video)

    def _text_segment(self, text: str) -> Segment:
        """Convert a text to a segment of token ids whose positions count up from 0."""
        # Special tokens split a text wherever they stand, so pieces between placeholders get the ids of the whole.
        pieces = [self.tokenizer(piece, add_special_tokens=False).input_ids for piece in text.split(_MARK)]
        ids = torch.tensor([i for piece in pieces for i in piece], dtype=torch.int64, device="cpu")
        return Segment(ids, torch.arange(len(ids), device="cpu").expand(self.axes, -1), len(ids))

    def _placeholders(self, count: int) -> Tensor:
        """Return ``count`` video placeholder ids, [count] int64."""
        return torch.full((count,), self.placeholder_id, dtype=torch.int64, device="cpu")

    @cached_property
    def open_tag(self) -> str:
        """The tag that the chat template opens where the model is to speak, such as ``<think>``; "" for none."""
        text: ChatPart = {"type": "text", "text": "Why?"}
        opened = _OPEN_TAG.search(self._apply_template([{"role": "user", "content": [text]}]))
        return opened[1] if opened else ""

    def _render(self, messages: Sequence[ChatMessage], n_videos: int) -> str:
        """Apply the chat template, and close the tag that it opens where the policy says so.

        Raise ValueError if the result does not have one placeholder a video.
        """
        told: list[ChatMessage] = [
            {**message, "content": [self._as_text(part) for part in message["content"]]} for message in messages
        ]
        rendered = self._apply_template(told)
        if rendered.count(self._video_token) != n_videos:
            raise ValueError(f"the chat template of this model has no place for {n_videos} videos here")
        if self.policy.thought == "closed":  # as the templates of Qwen write an empty thought
            rendered = f"{rendered.rstrip()}\n\n{self.open_tag.replace('<', '</')}\n\n"
        return rendered

    def _apply_template(self, messages: Sequence[ChatMessage]) -> str:
        """Return a conversation as the chat template writes it, up to where the model is to speak."""
        rendered: str = self.tokenizer.apply_chat_template(
            messages, chat_template=self.chat_template, tokenize=False, add_generation_prompt=True
        )
        return rendered

    def has_placeholder(self, text: str) -> bool:
        """Return whether a text holds the model's own placeholder of an image or video."""
        return self._video_token in text or self._image_token in text

    def _as_text(self, part: ChatPart) -> ChatPart:
        """Return a message part whose text cannot be mistaken for a video placeholder, which would shift every token.

        Raises ValueError for a text that is not valid or contains this module's own separator mark.
        """
        text = part.get("text", "")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # the tokenizer would raise a TypeError that names no text
            raise ValueError(f"the text is not valid: {error}") from None
        if _MARK in text:
            raise ValueError("the text holds U+10FFFE, which is no character: leave it out")
        for token in (self._video_token, self._image_token):
            text = text.replace(token, f"{token[:2]}{_MARK}{token[2:]}")
        return {**part, "text": text} if text else part


def chat_template(source: ModelSource) -> str:
    """Return the template that the stock processor would load: a file of its own before the tokenizer's settings.

    Raises ModelError where the checkpoint has none.
    """
    if (path := source.files.find("chat_template.jinja")) is not None:
        return path.read_text(encoding="utf-8")
    for filename in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        template = (source.files.read_json(filename) or {}).get("chat_template")
        if isinstance(template, str):
            return template
    raise ModelError(f"{source.name!r} has no chat template: copy chat_template.jinja from the original checkpoint")


def tokenizer_of(source: ModelSource) -> Any:
    """Load the checkpoint's tokenizer. Raises ModelError where there is none that can be loaded."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds; only where prompts or models are built

    name, revision = source.pretrained()
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare ones, and a damaged file a KeyError
        raise ModelError(
            f"{source.name!r} has no tokenizer that can be loaded ({type(error).__name__}: {error}): download it again"
        ) from error


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text alone. Raises ValueError where it has no token."""
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    if not ids:
        raise ValueError("a text to be scored needs at least one character")
    return ids


def kept_in_frame(visual: Visual, frame: int) -> Tensor:
    """Return the flat indices of a video's tokens in one frame; they ascend, so that no frame looks at all tokens."""
    edges = torch.tensor([frame, frame + 1], device=visual.index.device) * visual.tokens_per_frame
    first, end = torch.searchsorted(visual.index, edges)
    return visual.index[first:end]


def _places(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return (first token, end) of each video's placeholders in the prompt, texts between its frames included."""
    places: dict[int, tuple[int, int]] = {}
    starts = accumulate((len(segment.ids) for segment in segments), initial=0)
    for segment, start in zip(segments, starts, strict=False):
        if segment.video is not None:
            first, _ = places.get(segment.video, (start, start))
            places[segment.video] = first, start + len(segment.ids)
    return [places[video] for video in sorted(places)]
