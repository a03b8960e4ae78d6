"""Prompts of generic models: the checkpoint's own processor writes them, and dropped tokens are cut out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.generic.family import read_tail
from gstep.generic.halves import build_shell, select_token_inputs
from gstep.generic.layout import (
    Layout,
    choose_default_positions,
    compute_prompt_positions,
    find_placeholders,
    list_kept_rows,
    mark_kept_columns,
)
from gstep.generic.processor import (
    list_placeholder_texts,
    load_processor,
    render_conversation,
    replay_record,
    run_processor,
)
from gstep.language.prompt import PromptBuilder, Segment, chat_template, load_tokenizer, refuse_omissions
from gstep.language.types import ChatMessage, Prompt, PromptPolicy
from gstep.types import Visual

_RULE = "transformers-5"


class GenericPrompts(PromptBuilder):
    """The builder of prompts with one video or none, for any model of the generic family. Picklable.

    The columns of the dropped tokens are removed from the whole prompt. By default, positions are renumbered if they
    have one axis, and original if they have three (time, height, width).
    """

    def __init__(self, source: ModelSource, policy: PromptPolicy) -> None:
        """Load the processor, and the model without weights.

        Raises:
            ModelError: a file is missing or does not fit, or the source was resolved without the gate.
        """
        self.source = source
        self.layout = Layout.of(source)
        self.policy = policy
        self.deepstack_levels = self.layout.deepstack_levels
        self.tokenizer = load_tokenizer(source)
        self.chat_template = chat_template(source)
        self._load()

    def _load(self) -> None:
        """Load the processor and, for its rule of positions, the model on the meta device."""
        self._processor = load_processor(self.source)
        self._shell = _load_shell(self.source)
        self.config = self._shell.config
        self._special = list_placeholder_texts(self._processor, self.config)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "policy": self.policy}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["source"], state["policy"])  # type: ignore[misc]

    @classmethod
    def of(cls, source: ModelSource, positions: str | None, rule: str, frame_times: str, thought: str = "open") -> Self:
        """Make the builder of a model that the gate has checked, and render a question as a check of its template.

        ``positions`` None uses the default. If ``thought`` changes no prompt of this model, the policy records "open".

        Raises:
            ModelError: a file is missing or does not fit, or the model was resolved without the gate.
            ValueError: a policy value is unknown; ``rule`` or ``frame_times`` is not the default, which the model's own
                processor would ignore; or ``thought`` is "closed" and the template takes no question without a video.
        """
        template_hash = hashlib.sha256(chat_template(source).encode()).hexdigest()[:16]
        default = choose_default_positions(Layout.of(source).axes)
        policy = PromptPolicy(positions or default, rule, template_hash, frame_times, thought)
        if (rule, frame_times) != (_RULE, "true"):
            other = f"the rule {rule!r}" if rule != _RULE else f"frame times {frame_times!r}"
            raise ValueError(
                f"prompts of {source.name!r} are written by its own processor: {other} is for families with their own "
                "code"
            )
        builder = cls(source, policy)
        builder._check_template()
        if thought == "closed" and not builder.open_tag:
            builder.policy = replace(builder.policy, thought="open")
        return builder

    @property
    def hidden_size(self) -> int:
        """The hidden size D of a visual token."""
        return self.layout.hidden_size

    def n_visual(self, visuals: Sequence[Visual]) -> int:
        """Count the videos' placeholders in a prompt, tails included."""
        return sum(len(visual.index) + self.layout.tail for visual in visuals)

    def check(self, visual: Visual) -> None:
        """Raise ValueError if a video's tokens do not fit this model or their order, record or tail is wrong."""
        super().check(visual)
        if "record" not in visual.extra:
            raise ValueError("the cache lacks the processor's record of this video: prune it with --family generic")
        read_tail(visual.extra, self.layout)
        if (visual.index.diff() < 0).any():
            raise ValueError('prompts of this model need tokens in the order of frames: read them with order="index"')

    def build_chat(self, messages: Sequence[ChatMessage], visuals: Sequence[Visual]) -> Prompt:
        """Build the prompt of a conversation with one video or none, up to the start of the model's next message.

        Raises:
            ValueError: there are several videos; the cached tokens or the record of the video do not fit the model; a
                text is not valid Unicode or contains U+10FFFE; or the template refuses the conversation or omits a
                message's text.
            ModelError: the template exceeds the limits of rendering.
        """
        if len(visuals) > 1:
            raise ValueError(
                f"{self.source.name!r}: prompts of the generic family have at most one video, not {len(visuals)}"
            )
        for visual in visuals:
            self.check(visual)
        text = self._render_text(messages)
        refuse_omissions(messages, text)
        if not visuals:
            inputs = run_processor(self._processor, text, None, None)
            keep = torch.ones(inputs["input_ids"].shape[1], dtype=torch.bool, device="cpu")
            return self._make_pruned_prompt(inputs, keep, (), keep & False)
        (visual,) = visuals
        inputs = replay_record(self._processor, text, visual.extra["record"])
        n_tokens = visual.n_frames * visual.tokens_per_frame
        try:
            mask = find_placeholders(self.config, inputs["input_ids"], n_tokens + self.layout.tail)[0]
        except ModelError as error:
            raise ValueError(f"the cached tokens of this video do not fit the prompt: {error}") from None
        keep = mark_kept_columns(mask, list_kept_rows(visual.index, n_tokens, self.layout.tail))
        return self._make_pruned_prompt(inputs, keep, (visual,), mask)

    def _make_pruned_prompt(
        self, inputs: dict[str, Any], keep: Tensor, visuals: tuple[Visual, ...], mask: Tensor
    ) -> Prompt:
        """Make the prompt of the columns ``keep``, [L] bool, at the positions of the policy.

        Other inputs with a value per token, except the attention mask, become ``token_inputs``. The prefix ends with
        the last kept placeholder of ``mask``, [L] bool.
        """
        ids = inputs["input_ids"]
        columns = select_token_inputs(self._shell, inputs)
        others = {key: value[0, keep] for key, value in columns.items() if key not in ("input_ids", "attention_mask")}
        columns_kept = mask[keep].nonzero()[:, 0]
        spans = ((int(columns_kept[0]), int(columns_kept[-1]) + 1),) if len(columns_kept) else ()
        return Prompt(
            input_ids=ids[0, keep],
            positions=compute_prompt_positions(self._shell, inputs, keep, self.policy.positions),
            visuals=visuals,
            prefix_length=spans[0][1] if spans else 0,
            spans=spans,
            token_inputs=others,
        )

    def _make_visual_segment(self, visual: Visual, frame: int | None) -> Segment:
        raise NotImplementedError("the processor writes the placeholders of a generic model")

    @property
    def _placeholder_texts(self) -> Sequence[str]:
        """The texts that stand for an image, a video or a sound."""
        return self._special

    def _apply_template(self, messages: Sequence[ChatMessage]) -> str:
        return render_conversation(self.source, self._processor, messages)


@lru_cache(maxsize=2)
def _load_shell(source: ModelSource) -> Any:
    """Build a model on the meta device, once per process."""
    return build_shell(source)
