"""The inputs and outputs of a language model: chat messages, prompts, policies, decoding options and answers.

Shapes: L prompt tokens, A position axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from torch import Tensor

from gstep.types import Visual

POSITIONS = ("contiguous", "original")
RULES = ("transformers-5", "transformers-4.57", "vllm")
FRAME_TIMES = ("true", "stock")
THOUGHTS = ("open", "closed")


class ChatContent(TypedDict, total=False):
    """A part of a message's content: ``{"type": "video"}`` or ``{"type": "text", "text": ...}``."""

    type: str
    text: str


class ChatMessage(TypedDict):
    """A message in the form that chat templates take; ``role`` is "system", "user" or "assistant"."""

    role: str
    content: Sequence[ChatContent]


@dataclass(frozen=True)
class PromptPolicy:
    """The choices in building prompts and positions; recorded with every answer.

    Attributes:
        positions: "original": every kept token has its position among all tokens of its video; "contiguous": positions
            are renumbered over the kept tokens, as if no token had been pruned.
        rule: the library whose rules apply to Qwen: "transformers-5", "transformers-4.57" or "vllm"
            (:class:`gstep.language.qwen_vl.LibraryRule`).
        chat_template: a hash of the checkpoint's chat template.
        frame_times: the times that Qwen3-VL reads before its temporal patches. "true": the times at which frames are
            shown, from the start of the clip. "stock", as in transformers: the frame's index in the file divided by the
            average frame rate, which is wrong if the rate varies. Families that write no times have "true".
        thought: what follows a tag that the chat template opens before the answer, such as ``<think>``. "open": the
            model thinks first; "closed": the closing tag follows at once. Templates without such a tag have "open".

    Raises:
        ValueError: ``positions``, ``rule``, ``frame_times`` or ``thought`` is unknown.
    """

    positions: str
    rule: str = "transformers-5"
    chat_template: str = ""
    frame_times: str = "true"
    thought: str = "open"

    def __post_init__(self) -> None:
        options = {"positions": POSITIONS, "rule": RULES, "frame_times": FRAME_TIMES, "thought": THOUGHTS}
        for name, choices in options.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"unknown {name} {value!r}; known: {', '.join(choices)}")

    def describe(self) -> dict[str, str]:
        """Return the policy as JSON values; default values of ``frame_times`` and ``thought`` are left out."""
        defaults = {"frame_times": "true", "thought": "open"}
        return {name: value for name, value in asdict(self).items() if defaults.get(name) != value}


def read_placeholder(config: Any) -> tuple[str, int]:
    """Return the modality of a model's video tokens, "video" or "image", and the id of their placeholder token.

    The modality is "image" for a config without ``video_token_id``, such as InternVL's.
    """
    modality = "image" if getattr(config, "video_token_id", None) is None else "video"
    return modality, int(getattr(config, f"{modality}_token_id"))


def read_context_length(config: Any) -> int:
    """Return the maximum number of tokens in a prompt and its answer; 2^31 if the config has no limit."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31)


def has_linear_attention(config: Any) -> bool:
    """Return True if some layers have linear attention, which carries a state from token to token."""
    return "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())


@dataclass(frozen=True)
class Prompt:
    """One question about any number of videos, ready for the model; all tensors are on the CPU.

    Attributes:
        input_ids: [L] int64, with one placeholder for each visual token (and newline).
        positions: [A, L]: A = 1 on LLaVA-OneVision and InternVL, 3 (time, height, width) on Qwen. int64, except float32
            on Qwen3-Omni, whose times are fractions.
        visuals: the videos in the order of their placeholders.
        prefix_length: the number of tokens up to the last placeholder of the last video; 0 without a video.
        spans: (first token, end) of each video, with the markers of its first and last frame, if frames have markers.
        token_inputs: name -> [L], further inputs of ``forward`` per token, such as token types; empty except for the
            generic family.
    """

    input_ids: Tensor
    positions: Tensor
    visuals: tuple[Visual, ...]
    prefix_length: int
    spans: tuple[tuple[int, int], ...] = ()
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def extent(self) -> int:
        """The larger of the number of tokens and the last position + 1."""
        return max(len(self), int(self.positions.max()) + 1)


@dataclass(frozen=True)
class Decoding:
    """The decoding options of one answer.

    Attributes:
        max_new_tokens: the maximum length of the answer in tokens.
        temperature: 0 is greedy decoding; tokens are sampled above 0.
        top_p, top_k: limits to the most likely tokens when sampling; 1.0 and 0 turn them off.
        seed: the seed of this answer's sampling, which does not depend on its batch.

    Raises:
        ValueError: a value is out of range; the message has the range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError if a value is out of range."""
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "0 (greedy) or above"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or above"),
            "seed": (0 <= self.seed < 2**63, "in [0, 2^63)"),
        }
        for name, (is_valid, rule) in checks.items():
            if not is_valid:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Answer:
    """The answer of a language model to one prompt.

    Attributes:
        text: the answer without special tokens.
        token_ids: the generated tokens, without the token that ended the answer.
        finish: "stop" if the model ended the answer, "length" if max_new_tokens did.
        prefill_s: seconds to the first token, for the whole batch.
        decode_s: seconds from the first to the last token, for the whole batch.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: str
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Score:
    """The log-probability of a continuation: the sum of the natural log-probabilities of its tokens."""

    logprob: float
    n_tokens: int
