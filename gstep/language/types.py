"""What goes into a language model and what comes out of it; the tokens of a video are gstep.types.Visual.

Shapes: K kept tokens of one video, D hidden size, L prompt tokens; T, N and the flat index as in :mod:`gstep.types`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from torch import Tensor

from gstep.types import Visual

POSITIONS = ("contiguous", "original")
RULES = ("transformers-5", "transformers-4.57", "vllm")
FRAME_TIMES = ("true", "stock")
THOUGHTS = ("open", "closed")


class ChatPart(TypedDict, total=False):
    """A part of a message: ``{"type": "video"}`` or ``{"type": "text", "text": ...}``."""

    type: str
    text: str


class ChatMessage(TypedDict):
    """A message in the form that chat templates take."""

    role: str
    content: Sequence[ChatPart]


@dataclass(frozen=True)
class PromptPolicy:
    """How prompt and positions are built where several ways exist; recorded with every answer.

    Attributes:
        positions: "original": every kept token has the position that it had among all tokens of its video;
            "contiguous": positions count the kept tokens, as if there never had been others.
        rule: whose rules are followed where libraries differ on Qwen: "transformers-5", "transformers-4.57" or "vllm".
            They decide where the text after a video goes on, whether the seconds of a temporal patch are cut to an
            integer (Qwen2.5-VL), and whether the template's vision markers around a whole video stay (Qwen3-VL).
        chat_template: a hash of the checkpoint's chat template.
        frame_times: which times Qwen3-VL reads before its temporal patches: "true", when the frames are shown, from the
            start of the clip; "stock", as transformers writes them: the frame's place in the file by the average frames
            a second. Where a file's frame rate varies, the two differ. A family that writes no times has "true".
        thought: what becomes of a tag that the chat template opens where the model is to speak, such as ``<think>``:
            "open": the model thinks first; "closed": its closing tag follows at once. A template that opens none has
            "open".

    Raises ValueError for another name.
    """

    positions: str
    rule: str = "transformers-5"
    chat_template: str = ""
    frame_times: str = "true"
    thought: str = "open"

    def __post_init__(self) -> None:
        options = {"positions": POSITIONS, "rule": RULES, "frame_times": FRAME_TIMES, "thought": THOUGHTS}
        for name, known in options.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")

    def describe(self) -> dict[str, str]:
        """Return the policy for the record, JSON-able.

        True times and an open thought are left out: answers from before there were others have them too.
        """
        older = {"frame_times": "true", "thought": "open"}
        return {name: value for name, value in asdict(self).items() if older.get(name) != value}


def placeholder_of(config: Any) -> tuple[str, int]:
    """Return the modality under which a model takes a video's tokens, and the token that stands for each of them.

    InternVL takes frames as images, and has no token for videos.
    """
    modality = "image" if getattr(config, "video_token_id", None) is None else "video"
    return modality, int(getattr(config, f"{modality}_token_id"))


def has_linear_attention(config: Any) -> bool:
    """Tell a model whose layers carry a state from token to token (Qwen3.5) by its configuration."""
    return "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())


@dataclass(frozen=True)
class Prompt:
    """One question about one or more videos, ready for the model; everything on the CPU.

    Attributes:
        input_ids: [L] int64, with one placeholder for each visual token (and newline).
        positions: [A,L] int64: A = 1 on LLaVA-OneVision, 3 (time, height, width) on Qwen.
        visuals: the videos in the order of their placeholders.
        prefix_length: tokens up to and including the last video's, which questions on the same videos share.
        spans: (first token, end) of each video; where its frames have markers, from the first frame's to the last
            one's: a frame without a kept token takes room among the positions too.
    """

    input_ids: Tensor
    positions: Tensor
    visuals: tuple[Visual, ...]
    prefix_length: int
    spans: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def extent(self) -> int:
        """The context length that the prompt takes: its tokens, or its positions where those have gaps."""
        return max(len(self), int(self.positions.max()) + 1)


@dataclass(frozen=True)
class Decoding:
    """How an answer is decoded.

    Attributes:
        max_new_tokens: at most this many.
        temperature: 0 is greedy; above, tokens are drawn.
        top_p, top_k: draw among the likeliest tokens only; 1.0 and 0 are off.
        seed: of this answer alone: it does not depend on what else is in the batch.

    Raises ValueError where a value makes no sense.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "0 (greedy) or above"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or above"),
            "seed": (0 <= self.seed < 2**63, "in [0, 2^63)"),
        }
        for name, (ok, wanted) in checks.items():
            if not ok:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Answer:
    """The answer of a language model to one prompt.

    Attributes:
        text: without special tokens.
        token_ids: generated tokens; the one that ended the answer is left out.
        finish: "stop" where the model ended the answer, "length" where max_new_tokens did.
        prefill_s: seconds until the first token of the batch this answer was computed in.
        decode_s: seconds from there to the batch's last token.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: str
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Score:
    """The log-probability of a continuation after a prompt.

    Attributes:
        logprob: sum of the natural log-probabilities of its tokens.
        n_tokens: how many tokens those are.
    """

    logprob: float
    n_tokens: int
