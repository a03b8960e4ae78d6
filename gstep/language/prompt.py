"""Building prompts: token ids and positions from a question and the cached tokens of its videos, without weights."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.language.rendering import render_chat_template
from gstep.language.types import ChatContent, ChatMessage, Prompt, PromptPolicy, read_context_length, read_placeholder
from gstep.types import Visual

# A noncharacter that is inserted into placeholders in a user's text, so that the two pieces are tokenized as text.
MARK = "\U0010fffe"
_OPEN_TAG = re.compile(r"(<\w+>)\s*\Z")
# The beginning of a list of parts in the output of a template that writes the list as text.
_PRINTED_PARTS = "[{'type': '"


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a prompt: a text, or the placeholders of a video or a frame.

    Attributes:
        ids: [n] int64.
        positions: [A, n], counted from the start of the segment.
        extent: the number of positions from this segment's start to the next one's.
        video: the number of the video in the prompt, from 0; None for a text.
    """

    ids: Tensor
    positions: Tensor
    extent: int
    video: int | None = None


class PromptPiece(NamedTuple):
    """A text of a prompt, which may be empty, and the placeholders that follow it.

    Attributes:
        video: the number of the placeholders' video, from 0; None at the end of the prompt.
        frame: the number of their frame or temporal patch, from 0; None for the whole video.
    """

    text: str
    video: int | None = None
    frame: int | None = None


class PromptBuilder(ABC):
    """The builder of one model's prompts under one policy. Picklable.

    Attributes:
        placeholder_id: the id of the token that stands for a visual token or a newline.

    Class attributes:
        default_positions: the family's default for ``PromptPolicy.positions``.
        axes: the number of axes of a position, 1 or 3.
        needs_newline: True if a newline row follows each video.
    """

    default_positions: ClassVar[str]
    axes: ClassVar[int]
    needs_newline: ClassVar[bool] = False
    writes_times: ClassVar[bool] = False  # True if the prompt has the times of frames
    frame_markers: ClassVar[int] = 0  # tokens before and after the placeholders of each frame
    deepstack_levels: int = 0

    def __init__(self, config: Any, tokenizer: Any, chat_template: str, policy: PromptPolicy) -> None:
        """Initialize the builder from a transformers config and tokenizer."""
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.policy = policy
        self.placeholder_id = read_placeholder(config)[1]
        self._video_token, self._image_token = (
            str(tokenizer.convert_ids_to_tokens(i)) for i in (self.placeholder_id, int(config.image_token_id))
        )

    @classmethod
    def of(cls, source: ModelSource, positions: str | None, rule: str, frame_times: str, thought: str = "open") -> Self:
        """Make the builder from a checkpoint's config, tokenizer and chat template, and render a question as a check.

        The arguments after ``source`` are the fields of PromptPolicy; ``positions`` None uses the family's default. If
        ``frame_times`` or ``thought`` changes no prompt of this model, the policy records its default instead.

        Raises:
            ModelError: a file is missing or not valid, the placeholder of videos is not a special token of the
                tokenizer, or the template exceeds the limits of rendering.
            ValueError: a policy value is unknown, or ``thought`` is "closed" and the template takes no question without
                a video.
        """
        template = chat_template(source)
        template_hash = hashlib.sha256(template.encode()).hexdigest()[:16]
        policy = PromptPolicy(positions or cls.default_positions, rule, template_hash, frame_times, thought)
        if not cls.writes_times:  # answers must not differ by a setting that changes no prompt
            policy = replace(policy, frame_times="true")
        config = source.parse_stock_config()
        tokenizer = load_tokenizer(source)
        placeholder = read_placeholder(config)[1]
        if tokenizer.convert_ids_to_tokens(placeholder) not in tokenizer.get_added_vocab():
            raise ModelError(
                f"{source.name!r}: token {placeholder}, the placeholder of videos in config.json, is not a special "
                "token of the tokenizer: download the whole checkpoint"
            )
        builder = cls(config, tokenizer, template, policy)
        builder._check_template()
        # Only a rendered prompt shows whether the template opens a tag. Without one "closed" changes no prompt.
        if thought == "closed" and not builder.open_tag:
            builder.policy = replace(policy, thought="open")
        return builder

    def _check_template(self) -> None:
        """Render a question without a video once; a ValueError of the template, which may refuse it, is ignored.

        Raises:
            ModelError: the template is not valid or exceeds the limits of rendering.
        """
        try:
            self.open_tag  # noqa: B018 - renders it
        except ModelError:
            raise
        except ValueError:  # a template may refuse a conversation without a video
            return

    @property
    def context_length(self) -> int:
        """The maximum number of tokens in a prompt and its answer; 2^31 if the config has no limit."""
        return read_context_length(self.config)

    @property
    def hidden_size(self) -> int:
        """The hidden size D of the language model."""
        return int(self.config.get_text_config().hidden_size)

    def n_visual(self, visuals: Sequence[Visual]) -> int:
        """Return the number of placeholders of the videos, newlines included."""
        return sum(len(v.index) for v in visuals) + (len(visuals) if self.needs_newline else 0)

    def build(self, text: str, visuals: Sequence[Visual], system: str | None = None) -> Prompt:
        """Build the prompt of one user message, the videos and then the text, with the checkpoint's chat template.

        Placeholders of the model in ``text`` are treated as plain text.

        Args:
            system: a system message; None leaves it to the template.

        Raises:
            ValueError: a video's cached tokens do not fit the model, a text is not valid Unicode or contains U+10FFFE,
                or the template refuses or omits a message.
            ModelError: the template exceeds the limits of rendering.
        """
        content: list[ChatContent] = [*[ChatContent(type="video")] * len(visuals), {"type": "text", "text": text}]
        messages: list[ChatMessage] = [{"role": "user", "content": content}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        return self.build_chat(messages, visuals)

    def build_chat(self, messages: Sequence[ChatMessage], visuals: Sequence[Visual]) -> Prompt:
        """Build the prompt of a conversation with the checkpoint's chat template, up to the model's next message.

        Args:
            visuals: the cached tokens of the conversation's videos, in their order.

        Raises:
            ValueError: a video's cached tokens do not fit the model, a text is not valid Unicode or contains U+10FFFE,
                or the template refuses or omits a message, or does not write a placeholder for each video.
            ModelError: the template exceeds the limits of rendering.
        """
        for visual in visuals:
            self.check(visual)
        prompt_text = self._render_checked(messages, len(visuals))
        parts = self._make_parts(prompt_text.split(self._video_token), visuals)
        segments = list(self._make_segments(parts, visuals))
        starts = accumulate((segment.extent for segment in segments), initial=0)
        spans = _locate_videos(segments)
        return Prompt(
            input_ids=torch.cat([segment.ids for segment in segments]),
            positions=torch.cat([s.positions + start for s, start in zip(segments, starts, strict=False)], dim=1),
            visuals=tuple(visuals),
            prefix_length=spans[-1][1] if spans else 0,
            spans=tuple((first - self.frame_markers, end + self.frame_markers) for first, end in spans),
        )

    def check(self, visual: Visual) -> None:
        """Raise ValueError if a video's cached tokens do not fit this model.

        They do not fit if the hidden size or the number of deepstack levels differs, the newline is missing, or each
        frame has markers and the indices are not ascending.
        """
        if visual.tokens.shape[1] != self.hidden_size:
            raise ValueError(f"visual tokens of width {visual.tokens.shape[1]}; this model takes {self.hidden_size}")
        if len(visual.deepstack) != self.deepstack_levels:
            raise ValueError(
                f"{len(visual.deepstack)} deepstack levels in the cache; this model takes {self.deepstack_levels}"
            )
        if self.needs_newline and visual.newline is None:
            raise ValueError("the newline row of this model is missing from the cache")
        if self.frame_markers and (visual.index.diff() < 0).any():  # find_frame_indices needs ascending indices
            raise ValueError(
                "prompts of this model show a video frame by frame, and its tokens are in another order: read them "
                'with order="index" (--order index)'
            )

    @abstractmethod
    def _make_visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        """Make the segment of a whole video (``frame`` is None), or of one frame if each frame has markers."""

    def _make_parts(self, texts: list[str], visuals: Sequence[Visual]) -> list[PromptPiece]:
        """Make a part for each video and a last text, from the texts around the videos.

        A family with markers around each frame has a part for each frame instead.
        """
        return [*(PromptPiece(text, video) for video, text in enumerate(texts[:-1])), PromptPiece(texts[-1])]

    def _make_segments(self, parts: list[PromptPiece], visuals: Sequence[Visual]) -> Iterator[Segment]:
        """Yield the segments of a prompt in order: texts, unless empty, and the placeholders of videos or frames."""
        for part in parts:
            if part.text:
                yield self._make_text_segment(part.text)
            if part.video is not None:
                yield replace(self._make_visual_segment(visuals[part.video], part.frame), video=part.video)

    def _make_text_segment(self, text: str) -> Segment:
        """Tokenize a text into a segment whose positions count up from 0; MARK splits the text and gives no token."""
        # Special tokens split a text anywhere, so pieces between placeholders get the same ids as in the whole text.
        pieces = [self.tokenizer(piece, add_special_tokens=False).input_ids for piece in text.split(MARK)]
        ids = torch.tensor([i for piece in pieces for i in piece], dtype=torch.int64, device="cpu")
        return Segment(ids, torch.arange(len(ids), device="cpu").expand(self.axes, -1), len(ids))

    def _make_placeholders(self, count: int) -> Tensor:
        """Return ``count`` placeholder ids, [count] int64."""
        return torch.full((count,), self.placeholder_id, dtype=torch.int64, device="cpu")

    @cached_property
    def open_tag(self) -> str:
        """The tag that the chat template opens before the model's message, such as ``<think>``; "" if there is none.

        The first access renders a question without a video. It raises ModelError for an invalid template, ValueError if
        that refuses the question.
        """
        text: ChatContent = {"type": "text", "text": "Why?"}
        match = _OPEN_TAG.search(self._apply_template([{"role": "user", "content": [text]}]))
        return match[1] if match else ""

    def _render_checked(self, messages: Sequence[ChatMessage], n_videos: int) -> str:
        """Render the messages; ValueError if the result lacks a text or does not have ``n_videos`` placeholders."""
        prompt_text = self._render_text(messages)
        if prompt_text.count(self._video_token) != n_videos:
            raise ValueError(f"the chat template of this model does not write {n_videos} videos in this conversation")
        refuse_omissions(messages, prompt_text)
        return prompt_text

    def _render_text(self, messages: Sequence[ChatMessage]) -> str:
        """Apply the chat template, with the placeholders in message texts broken up.

        The tag that the template opens is closed if the policy's ``thought`` is "closed".
        """
        safe_messages: list[ChatMessage] = [
            {**message, "content": [self._escape_placeholders(part) for part in message["content"]]}
            for message in messages
        ]
        prompt_text = self._apply_template(safe_messages)
        if self.policy.thought == "closed":  # as the templates of Qwen write an empty thought
            prompt_text = f"{prompt_text.rstrip()}\n\n{self.open_tag.replace('<', '</')}\n\n"
        return prompt_text

    def _apply_template(self, messages: Sequence[ChatMessage]) -> str:
        """Apply the chat template, up to the start of the model's next message."""
        return render_chat_template(self.tokenizer, self.chat_template, messages)

    @property
    def _placeholder_texts(self) -> Sequence[str]:
        """The texts that the model would interpret as a video or an image."""
        return self._video_token, self._image_token

    def refuse_placeholders(self, texts: Iterable[str]) -> None:
        """Raise ValueError if a text has a placeholder of the model, such as ``<video>``.

        :meth:`build` treats it as plain text, which gives other tokens than the stock processor.
        """
        for text in texts:
            for token in self._placeholder_texts:
                if token in text:
                    raise ValueError(
                        f"the text has {token}, which stands for a video, an image or a sound in the prompts of this "
                        "model: leave it out, or write it in another way. Videos are put into a prompt without it"
                    )

    def _escape_placeholders(self, part: ChatContent) -> ChatContent:
        """Insert MARK into each placeholder in a message part's text, so that only real videos have placeholders.

        Raises:
            ValueError: the text is not valid Unicode, or contains MARK itself.
        """
        text = part.get("text", "")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # the tokenizer's own TypeError would not mention the text
            raise ValueError(f"the text is not valid: {error}") from None
        if MARK in text:
            raise ValueError("the text holds U+10FFFE, which is no character: leave it out")
        for token in self._placeholder_texts:
            text = text.replace(token, f"{token[:2]}{MARK}{token[2:]}")
        return {**part, "text": text} if text else part


def refuse_omissions(messages: Sequence[ChatMessage], prompt_text: str) -> None:
    """Raise ValueError if a rendered prompt lacks a message's text, or has a list of parts that was written as text.

    Only the text after a message's last ``</think>`` is compared, without white space around it, and the order of the
    texts does not matter.
    """
    prompt_text = prompt_text.replace(MARK, "")
    start = n_printed = 0
    for message in messages:
        for part in message["content"]:
            text = part.get("text", "")
            n_printed += text.count(_PRINTED_PARTS)
            spoken = text.rpartition("</think>")[2].strip()
            text_start = prompt_text.find(spoken, start)
            if text_start < 0:  # a template may move a text
                text_start = prompt_text.find(spoken)
            if text_start < 0:
                raise ValueError(
                    f"the chat template of this model leaves out the text of a message of the role {message['role']}: "
                    "put the text into a message of the user"
                )
            start = text_start + len(spoken)
    if prompt_text.count(_PRINTED_PARTS) > n_printed:
        raise ValueError("the chat template of this model does not take a message as a list of parts")


def chat_template(source: ModelSource) -> str:
    """Return the chat template that transformers' processor would apply by default, or otherwise its tokenizer's.

    As in ``ProcessorMixin.get_processor_dict``, whose import would take seconds, the order is processor_config.json,
    chat_template.json, chat_template.jinja with additional_chat_templates. If there are several templates, the template
    named "default" is returned. Files are downloaded if needed.

    Raises:
        ModelError: there is no default template, a file is not valid or cannot be downloaded, or the checkpoint has
            both chat_template.json and additional_chat_templates, which transformers refuses.
    """
    files = source.files
    tokenizer = load_tokenizer(source)  # for a model on the Hub, this also downloads additional templates
    template: Any = (files.read_json("processor_config.json") or {}).get("chat_template")
    if template is None:
        files.require_any("chat_template.jinja", "chat_template.json")
    legacy = files.read_json("chat_template.json")
    default = files.find("chat_template.jinja")
    folder = source.file("config.json").parent / "additional_chat_templates"
    paths = {path.stem: path for path in folder.glob("*.jinja")}
    if legacy is not None and paths:
        raise ModelError(
            f"{source.name!r} has chat_template.json and additional_chat_templates, which transformers refuses: "
            "replace chat_template.json by chat_template.jinja"
        )
    if template is None and legacy is not None:
        template = legacy.get("chat_template")
    elif template is None:
        paths |= {} if default is None else {"default": default}
        template = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    template = template or tokenizer.chat_template
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str) or not template:
        raise ModelError(f"{source.name!r} has no chat template: copy chat_template.jinja from the original checkpoint")
    return template


def load_tokenizer(source: ModelSource) -> Any:
    """Load the checkpoint's tokenizer, or return it if it is one of the last two loaded; callers must not modify it.

    Files are downloaded if needed; a folder whose files have changed is read again.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    name, revision = source.pretrained()
    for filename in ("tokenizer.json", "tokenizer_config.json"):
        source.files.find(filename)  # transformers would load another tokenizer without a file that the cache lacks
    try:
        return _load_tokenizer(name, revision, read_folder_state(name, revision))
    except Exception as error:  # the tokenizers library raises bare Exceptions, and a damaged file a KeyError
        raise ModelError(
            f"{source.name!r} has no tokenizer that can be loaded ({type(error).__name__}: {error}): download it again"
        ) from error


#: The name, size and modification time of each entry of a folder.
FolderState = tuple[tuple[str, int, int], ...]


def read_folder_state(name: str, revision: str | None) -> FolderState:
    """Return the state of a model's folder; () if ``revision`` is a commit."""
    if revision is not None:
        return ()
    files = [(file.name, file.stat()) for file in sorted(Path(name).iterdir())]
    return tuple((filename, stat.st_size, stat.st_mtime_ns) for filename, stat in files)


@lru_cache(maxsize=2)
def _load_tokenizer(name: str, revision: str | None, state: FolderState) -> Any:
    """Load a tokenizer; ``state`` makes the cache reload a folder that has changed."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds; needed only to build prompts or models

    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def tokenize_text(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text without special tokens around it; ValueError for a text without a token."""
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    if not ids:
        raise ValueError("the text is empty: a text to embed or score needs at least one character")
    return ids


def find_frame_indices(visual: Visual, frame: int) -> Tensor:
    """Return the flat indices of a video's kept tokens in one frame; the video's indices must be ascending."""
    edges = torch.tensor([frame, frame + 1], device=visual.index.device) * visual.tokens_per_frame
    first, end = torch.searchsorted(visual.index, edges)
    return visual.index[first:end]


def _locate_videos(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Locate each video's placeholders in the prompt, (first token, end), with the texts between its frames."""
    spans: dict[int, tuple[int, int]] = {}
    starts = accumulate((len(segment.ids) for segment in segments), initial=0)
    for segment, start in zip(segments, starts, strict=False):
        if segment.video is not None:
            first, _ = spans.get(segment.video, (start, start))
            spans[segment.video] = first, start + len(segment.ids)
    return [spans[video] for video in sorted(spans)]
