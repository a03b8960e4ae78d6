"""Where vLLM makes prompts of messages: its own renderer, but that videos come from a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer

from gstep.serving.inputs import engine_input
from pipeline.serve import CONFIG
from pipeline.serve.prompts import CachedPrompts, ServedCache, parts_of

_READY = "cached_videos_input"  # of a prompt that needs no processor
# Of a request what may be set with a cached video: all else changes prompts in ways that are not looked into here.
_TAKEN = frozenset(("add_generation_prompt", "tokenize", "return_dict", "cohere_format"))  # the last is the server's


class CachedVideosRenderer(HfRenderer):  # type: ignore[misc]
    """Follows BaseRenderer of vLLM 0.30 to 0.32: messages -> prompt -> what the engine takes."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._served = ServedCache(**config.additional_config[CONFIG])
        self._prompts: CachedPrompts | None = None

    def render_messages(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        """A conversation with no video is vLLM's own matter; whatever else a part may name is refused first."""
        read = [dict(message) for message in messages]
        for message in read:
            if isinstance(message.get("content"), Sequence | Mapping) or message.get("content") is None:
                continue
            message["content"] = list(message["content"])  # pydantic gives an iterator, which ends
        try:
            parts = [part for message in read for part in parts_of(message)]
            if not any("url" in part for part in parts):
                return super().render_messages(read, params)  # type: ignore[no-any-return]
            _check(params)
            prompt = self._made().build(read)
        except VLLMValidationError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise VLLMValidationError(str(error), parameter="messages") from error
        ids = prompt.input_ids.tolist()
        ready = engine_input(prompt, self._made().builder.config.video_token_id)
        conversation = [{"role": message["role"], "content": _text(message)} for message in read]
        return conversation, {"prompt_token_ids": ids, _READY: ready}

    async def render_messages_async(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        """The same in a thread: it reads files, and hashes tokens."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.render_messages, messages, params)

    def process_for_engine(self, prompt: Any, arrival_time: float, **keywords: Any) -> Any:
        """What is ready goes on as it is."""
        ready = _ready(prompt, arrival_time)
        return super().process_for_engine(prompt, arrival_time, **keywords) if ready is None else ready

    async def process_for_engine_async(self, prompt: Any, arrival_time: float, **keywords: Any) -> Any:
        """As above."""
        ready = _ready(prompt, arrival_time)
        return await super().process_for_engine_async(prompt, arrival_time, **keywords) if ready is None else ready

    def _made(self) -> CachedPrompts:
        # Not in __init__: the engine's own process makes a renderer too, and asks it for its tokenizer alone.
        if self._prompts is None:
            self._prompts = CachedPrompts(self._served)
        return self._prompts


def _ready(prompt: Any, arrival_time: float) -> Any:
    if not isinstance(prompt, dict) or _READY not in prompt:
        return None
    ready = prompt[_READY]
    if prompt["prompt_token_ids"] != ready["prompt_token_ids"]:
        raise VLLMValidationError("a prompt with cached videos cannot be cut", parameter="truncate_prompt_tokens")
    salt = {"cache_salt": prompt["cache_salt"]} if prompt.get("cache_salt") else {}
    return {**ready, "arrival_time": arrival_time, **salt}


def _check(params: Any) -> None:
    asked = params.chat_template_kwargs
    if refused := sorted(name for name, value in asked.items() if value and name not in _TAKEN):
        raise VLLMValidationError(f"{refused[0]} cannot go with a cached video", parameter=refused[0])
    if asked.get("add_generation_prompt") is False:
        raise VLLMValidationError("add_generation_prompt must be true with a cached video")


def _text(message: Mapping[str, Any]) -> str:
    return "".join(part.get("text", "") for part in parts_of(message))
