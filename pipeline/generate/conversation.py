"""Conversations: the column ``messages`` of a questions file, checked and normalized; tables hold it as JSON.

In the normalized form, the content of a message is a list of parts, ``{"type": "text", "text": ...}`` and ``{"type":
"video"}``, as the chat templates of video models take it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from pipeline.errors import QuestionsError
from pipeline.inputs.tables import UserValue

if TYPE_CHECKING:  # the import would load torch, which readers of answers do not need
    from gstep.language.types import ChatContent, ChatMessage

_ROLES = ("system", "user", "assistant")
_FORM = '{"role": "user", "content": ...}'


def parse_messages(value: UserValue, where: str, n_videos: int) -> list[ChatMessage]:
    """Check the messages of a row, and return them normalized.

    If no message has a video part, all videos are put at the start of the first user message.

    Args:
        value: a list of messages, or its JSON.
        where: the file and row, with which an error begins.

    Raises:
        QuestionsError: the value is not such a list, or is empty; a message is invalid; the last one is not a user
            message with text; or the number of video parts is neither 0 nor ``n_videos``, the number of the row's
            videos.
    """
    try:
        if isinstance(value, str):
            value = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise QuestionsError(f"{where}: messages must be a list like [{_FORM}], or its JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise QuestionsError(f"{where}: messages must be a list like [{_FORM}] (in .csv as JSON), got {value!r}")
    messages = [
        _parse_message(message, f"{where}: message {number}", is_first=number == 1)
        for number, message in enumerate(value, 1)
    ]
    if messages[-1]["role"] != "user":
        raise QuestionsError(
            f"{where}: the last message must be of the role user, which the model answers, got {messages[-1]['role']}"
        )
    if not get_question(messages).strip():
        raise QuestionsError(f"{where}: the last message needs a text, the question that the model answers")
    n_parts = sum(part["type"] == "video" for message in messages for part in message["content"])
    if not n_parts:
        first = next(message for message in messages if message["role"] == "user")
        videos: list[ChatContent] = [{"type": "video"}] * n_videos
        first["content"] = [*videos, *first["content"]]
    elif n_parts != n_videos:
        raise QuestionsError(
            f"{where}: the messages have {n_parts} parts of the type video, and video_id names {n_videos} videos: each "
            "needs one part, in this order; without any, all videos stand at the start of the first user message"
        )
    return messages


def _parse_message(value: UserValue, where: str, *, is_first: bool) -> ChatMessage:
    """Check one message, and return it with its content as a list of parts; ``where`` names it in an error.

    Raises:
        QuestionsError: it has an unknown role, an unknown key with a value other than None, a system message that is
            not first, empty content, an invalid part, or a video outside of a user message.
    """
    if not isinstance(value, Mapping):
        raise QuestionsError(f"{where} must be an object like {_FORM}, got {value!r}")
    _refuse_keys(value, {"role", "content"}, where)
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        raise QuestionsError(f"{where}: role must be {', '.join(_ROLES)}, got {role!r}")
    if role == "system" and not is_first:
        raise QuestionsError(f"{where}: a message of the role system must be the first one")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise QuestionsError(f"{where}: content must be a text or a list of parts that is not empty, got {content!r}")
    chat_parts = [_parse_part(part, where) for part in parts]
    if role != "user" and any(part["type"] == "video" for part in chat_parts):
        raise QuestionsError(f"{where}: a video stands in a message of the role user, not of {role}")
    return {"role": str(role), "content": chat_parts}


def _parse_part(value: UserValue, where: str) -> ChatContent:
    """Return a checked part of a message, without keys whose value is None.

    Raises:
        QuestionsError: the part is neither a text that is not blank nor a video, or has further keys.
    """
    if not isinstance(value, Mapping):
        raise QuestionsError(f'{where}: a part must be an object like {{"type": "text", "text": ...}}, got {value!r}')
    kind, text = value.get("type"), value.get("text")
    if kind == "text":
        _refuse_keys(value, {"type", "text"}, where)
        if not isinstance(text, str) or not text.strip():
            raise QuestionsError(f"{where}: content must be a text that is not blank, got {text!r}")
        return {"type": "text", "text": text}
    if kind == "video":
        _refuse_keys(value, {"type"}, where)
        return {"type": "video"}
    raise QuestionsError(
        f'{where}: a part of the type {kind!r}: known are text and video ({{"type": "video"}}, where a video of '
        "video_id stands); images and audio are not read"
    )


def _refuse_keys(value: Mapping[str, UserValue], known: set[str], where: str) -> None:
    """Raise QuestionsError if an unknown key has a value other than None."""
    if unknown := [str(key) for key in value if key not in known and value[key] is not None]:
        remedy = "; the video is named by video_id" if "video" in (value.get("type"), *unknown) else ""
        raise QuestionsError(f"{where}: {unknown[0]} is not read: leave it out{remedy}")


def has_system(messages: Sequence[ChatMessage]) -> bool:
    """Return True if a conversation begins with a system message."""
    return messages[0]["role"] == "system"


def get_question(messages: Sequence[ChatMessage]) -> str:
    """Return the text parts of the last message, joined by newlines."""
    return "\n".join(part["text"] for part in messages[-1]["content"] if "text" in part)


def list_texts(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the text parts of all messages, in order."""
    return [part["text"] for message in messages for part in message["content"] if "text" in part]


def load_messages(text: str) -> list[ChatMessage]:
    """Parse the JSON of normalized messages, as tables hold it."""
    return cast("list[ChatMessage]", json.loads(text))


def make_chat(messages: Sequence[ChatMessage], system: str | None, ending: str) -> list[ChatMessage]:
    """Return the messages of a prompt: the system message, if any, and the conversation; arguments are not modified.

    Args:
        system: a system message to put first; None if there is none, or the conversation has its own.
        ending: appended to the last text part: the text that lists the choices of the question, or "".
    """
    parts = [part.copy() for part in messages[-1]["content"]]
    last = next(part for part in reversed(parts) if "text" in part)
    last["text"] += ending
    before: list[ChatMessage] = []
    if system is not None:
        before = [{"role": "system", "content": [{"type": "text", "text": system}]}]
    return [*before, *messages[:-1], {"role": "user", "content": parts}]
