"""The vLLM renderer that turns messages with links to cached videos into prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from fastapi import HTTPException
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.renderers.hf import HfRenderer

from gstep.serving.options import check_connectors, read_max_video_rows
from gstep.serving.prompts import make_engine_input
from pipeline.errors import CorruptShard, UnknownVideo
from pipeline.serve.gate import VIDEOS
from pipeline.serve.prompts import CachedPrompts, Conversation, ServedCache, get_cached_prompts, parse_content
from pipeline.serve.videos import ServedVideo, StoreAway, TooLarge, VideoGone

_READY = "cached_videos_input"  # the key that marks a prompt as ready for the engine
# Template options that a request with a cached video may have: others would change the prompt in unchecked ways.
# The server itself adds the last one.
_ACCEPTED_NAMES = frozenset(("add_generation_prompt", "tokenize", "return_dict", "cohere_format"))
_LONG = 2**14  # characters, about 10 ms: longer texts are tokenized in a thread where short ones need not wait
_STATUS = {StoreAway: 503, TooLarge: 503, VideoGone: 410, CorruptShard: 500}


class CachedVideosRenderer(HfRenderer):  # type: ignore[misc]
    """The vLLM renderer that turns messages with links to cached videos into prompts.

    It follows BaseRenderer of vLLM 0.30 to 0.32.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        """Create the two threads that tokenize.

        Raises:
            ModelError: the configuration has a KV connector that cannot tell videos apart.
        """
        check_connectors({"kv_transfer_config": config.kv_transfer_config})  # in whatever way it was set
        super().__init__(config, tokenizer)
        self._served = ServedCache.from_config(config)
        self._short, self._long = (ThreadPoolExecutor(1, f"prompts-{name}") for name in ("short", "long"))

    def render_messages(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        """Return (messages, prompt), blocking until the videos are read.

        A conversation without a video is rendered by vLLM.

        Raises:
            ValueError: the messages or options are not supported.
            UnknownVideo, VideoGone, StoreAway, CorruptShard, TooLarge: a video cannot be used.
        """
        conversation = self._read(messages, params)
        if isinstance(conversation, list):
            return super().render_messages(conversation, params)  # type: ignore[no-any-return]
        return self._prompt(conversation, [self._get_prompts().find(link).result() for link in conversation.links])

    async def render_messages_async(self, messages: list[Any], params: Any) -> tuple[list[Any], Any]:
        """Return (messages, prompt), waiting only for the videos and texts of this request.

        Sets the names of the videos for the gate, which adds them to the answer's headers. A conversation without a
        video is rendered by vLLM, once its parts are checked.

        Raises:
            VLLMValidationError: an error of the client, which gets a 400, such as an unknown video.
            HTTPException: 503 if the store does not answer or the video is too large, 410 if it was removed, 500 if its
                tokens are damaged.
        """
        try:
            conversation = self._read(messages, params)
            if isinstance(conversation, list):
                return await super().render_messages_async(conversation, params)  # type: ignore[no-any-return]
            # If a client disconnects, only its wait is canceled, not the read, which other clients may share.
            reads = [asyncio.shield(asyncio.wrap_future(self._get_prompts().find(link))) for link in conversation.links]
            videos = await asyncio.gather(*reads)
            pool = self._long if conversation.n_characters > _LONG else self._short
            ready = await asyncio.get_running_loop().run_in_executor(pool, self._prompt, conversation, videos)
        except VLLMValidationError:  # it is a ValueError that names its parameter already
            raise
        except (StoreAway, TooLarge, VideoGone, CorruptShard) as error:
            raise HTTPException(_STATUS[type(error)], str(error)) from error
        except (ValueError, KeyError, TypeError, UnknownVideo) as error:
            raise VLLMValidationError(str(error), parameter="messages") from error
        if (names := VIDEOS.get()) is not None:
            names[:] = [video.content_name for video in videos]
        return ready

    def process_for_engine(self, prompt: Any, arrival_time: float, *, skip_mm_cache: bool = False, **more: Any) -> Any:
        """Return the engine's input for a prompt; vLLM itself processes prompts without cached videos.

        Raises:
            VLLMValidationError: a prompt with cached videos was truncated.
        """
        if (ready := self._make_ready_input(prompt, arrival_time, skip_mm_cache=skip_mm_cache)) is not None:
            return ready
        return super().process_for_engine(prompt, arrival_time, skip_mm_cache=skip_mm_cache, **more)

    async def process_for_engine_async(
        self, prompt: Any, arrival_time: float, *, skip_mm_cache: bool = False, **more: Any
    ) -> Any:
        """Return the engine's input for a prompt, without waiting if it has cached videos."""
        if (ready := self._make_ready_input(prompt, arrival_time, skip_mm_cache=skip_mm_cache)) is not None:
            return ready
        return await super().process_for_engine_async(prompt, arrival_time, skip_mm_cache=skip_mm_cache, **more)

    def _make_ready_input(self, prompt: Any, arrival_time: float, *, skip_mm_cache: bool) -> Any:
        """Return the engine's input for a prompt with cached videos; None for any other prompt.

        Rows that the engine has already are left out: vLLM's cache of multimodal items records which rows were sent.

        Args:
            skip_mm_cache: send all rows, without recording them.

        Raises:
            VLLMValidationError: the prompt was truncated.
        """
        if not isinstance(prompt, dict) or _READY not in prompt:
            return None
        ready = prompt[_READY]
        cache = None if skip_mm_cache else self.mm_processor_cache
        if prompt["prompt_token_ids"] != ready["prompt_token_ids"]:
            raise VLLMValidationError("a prompt with cached videos cannot be cut", parameter="truncate_prompt_tokens")
        if cache is not None:
            items = {
                modality: [
                    cache.get_and_update_item((item, []), name)[0]
                    for item, name in zip(ready["mm_kwargs"][modality], names, strict=True)
                ]
                for modality, names in ready["mm_hashes"].items()
            }
            ready = {**ready, "mm_kwargs": MultiModalKwargsItems(items)}
            self.update_mm_cache_stats()
        salt = {"cache_salt": prompt["cache_salt"]} if prompt.get("cache_salt") else {}
        return {**ready, "arrival_time": arrival_time, **salt}

    @cached_property
    def _room(self) -> int:
        """The visual tokens that a video may have in a prompt."""
        return read_max_video_rows(self.config)

    def _get_prompts(self) -> CachedPrompts:
        """Return this process's maker of prompts; the first call opens the caches."""
        # Not in __init__: the engine's process creates a renderer, too, and uses only its tokenizer.
        return get_cached_prompts(self._served)

    def _read(self, messages: list[Any], params: Any) -> Conversation | list[Any]:
        """Parse messages that link a video; return other messages unparsed, as a list, for vLLM itself.

        Raises:
            VLLMValidationError: a template option is not supported with cached videos.
            ValueError: a part or link is not supported, the texts are too long, or a text has a placeholder of the
                model, which vLLM would take for a video.
        """
        message_dicts = [dict(message) for message in messages]
        for message in message_dicts:
            if isinstance(message.get("content"), Sequence | Mapping) or message.get("content") is None:
                continue
            message["content"] = list(message["content"])  # pydantic passes an iterator, which can be read only once
        parts = [part for message in message_dicts for part in parse_content(message)]
        texts = [part.get("text", "") for part in parts]
        prompts = self._get_prompts()
        prompts.check_length(sum(map(len, texts)))
        prompts.builder.refuse_placeholders(texts)
        if not any("url" in part for part in parts):
            return message_dicts
        _check_params(params)
        return prompts.read(message_dicts)

    def _prompt(self, conversation: Conversation, videos: Sequence[ServedVideo]) -> tuple[list[Any], Any]:
        """Build the prompt of a conversation; return the messages, with their texts only, and the prompt."""
        prompts = self._get_prompts()
        prompt = prompts.prompt(conversation, videos, self._room)
        ready = make_engine_input(prompt, prompts.builder.placeholder_id)
        messages = [
            {"role": message["role"], "content": "".join(part.get("text", "") for part in message["content"])}
            for message in conversation.messages
        ]
        return messages, {"prompt_token_ids": prompt.input_ids.tolist(), _READY: ready}


def _check_params(params: Any) -> None:
    """Raise VLLMValidationError for unsupported template options."""
    options = params.chat_template_kwargs
    if refused_names := sorted(name for name, value in options.items() if value and name not in _ACCEPTED_NAMES):
        raise VLLMValidationError(f"{refused_names[0]} cannot go with a cached video", parameter=refused_names[0])
    if options.get("add_generation_prompt") is False:
        raise VLLMValidationError("add_generation_prompt must be true with a cached video")
