"""How a benchmark is asked, as data: prompt, system message, frames, sizes, decoding, and the rule that reads replies.

Sources: github.com/EvolvingLMMs-Lab/lmms-eval, wheels 0.7.3 and 0.5.0, in ``models/`` the files
``simple/llava_onevision.py``, ``chat/qwen2_5_vl.py`` and ``chat/qwen3_vl.py``; for sizes and rounding,
``vision_process.py`` of qwen-vl-utils 0.0.14 (github.com/QwenLM/Qwen3-VL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from gstep.language import Decoding
from pipeline.generate.questions import INSTRUCTION, REASONING, describe_decoding, list_letters, strip_letters
from pipeline.rows import JsonObject

if TYPE_CHECKING:
    from pipeline.evaluate.benchmarks.items import Item

#: How a question with options is answered: a reply is generated and read, or options are scored.
ChoicesMethod = Literal["generate", "letter", "loglikelihood"]
#: The metric that is the mean over all questions.
QUESTIONS = "questions"
#: The GSTEP paper's protocol. The paper does not name it, but its rows of full retention, VidCom2 and FastV are, digit
#: for digit, those of github.com/xuyang-liu16/VidCom2, which bundles lmms-eval 0.5.0: 32 frames, greedy replies.
PAPER = "paper"
#: Other names of protocols.
ALIASES: Mapping[str, str] = {PAPER: "lmms-eval-0.5"}
_HELPFUL = "You are a helpful assistant."


@dataclass(frozen=True)
class PromptTemplate:
    """The template of the user's message, as format strings.

    Attributes:
        template: the message for a question with options; has ``{question}`` and ``{options}``, the options' lines.
        option: the line of one option; has ``{letter}`` and ``{text}``.
        free: the message for a question without options; has ``{question}``.
    """

    template: str
    option: str = "{text}"
    free: str = "{question}"

    def text(self, question: str, options: Sequence[str]) -> str:
        """Return the message for a question; without options it is ``free``. Braces in the texts stay as they are.

        If ``option`` adds letters, letters that all options carry already are removed first.
        """
        if not options:
            return self.free.format(question=question)
        texts = strip_letters(options) if "{letter}" in self.option else options
        pairs = zip(list_letters(len(options)), texts, strict=True)
        lines = "\n".join(self.option.format(letter=letter, text=text) for letter, text in pairs)
        return self.template.format(question=question, options=lines)


@dataclass(frozen=True)
class FrameRule:
    """The frames that are sampled from a video: ``num_frames``, spread evenly from the first frame to the last.

    Attributes:
        rounding: how a fractional frame index becomes an integer.
        even: True to sample an even number of frames, and no more than the video has. If False, frames of a short video
            are repeated.
    """

    num_frames: int = 32
    rounding: Literal["truncate", "round"] = "truncate"
    even: bool = False


@dataclass(frozen=True)
class PixelLimits:
    """The values of jobs.prune's ``--min-pixels`` and ``--max-pixels``.

    On Qwen2.5-VL they apply to each frame, on Qwen3-VL to all frames together.
    """

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True)
class ModelRules:
    """The rules of a protocol for one model type.

    Attributes:
        system: the system message; None for that of the chat template.
        pixels: the limits of the frames' sizes; None for the checkpoint's own limits.
        frame_times: the frame times in the prompt, as jobs.generate's ``--frame-times``.
    """

    system: str | None = None
    frames: FrameRule = FrameRule()
    pixels: PixelLimits | None = None
    frame_times: Literal["true", "stock"] = "true"

    def describe(self) -> JsonObject:
        """Return the rules as a JSON-able record, without ``frame_times`` if it is the default."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("frame_times", "true")}

    def adapt_to_family(self, model_type: str, family: str) -> ModelRules:
        """Return the rules for a model of this type whose code is in ``family``.

        Another family than that of the model type gets the checkpoint's size limits and the true frame times.
        """
        return self if family == model_type else replace(self, pixels=None, frame_times="true")


# lmms-eval passes its own limits to the processor and to qwen-vl-utils, which allows at most 768 tokens per frame.
_MIN = 256 * 28 * 28
_ROUNDED_FRAMES = FrameRule(32, "round", even=True)
_QWEN2_5_VL = ModelRules(None, _ROUNDED_FRAMES, PixelLimits(_MIN, 768 * 28 * 28))
# On Qwen3-VL, our limits apply to all frames together, and lmms-eval's to each frame.
_QWEN3_PIXELS = PixelLimits(_ROUNDED_FRAMES.num_frames * _MIN, _ROUNDED_FRAMES.num_frames * 768 * 32 * 32)
_QWEN3_0_7 = ModelRules(_HELPFUL, _ROUNDED_FRAMES, _QWEN3_PIXELS, "stock")
_QWEN3_0_5 = ModelRules(None, _ROUNDED_FRAMES, _QWEN3_PIXELS, "stock")

#: The rules of lmms-eval 0.7.3, in the classes that ``--model llava_onevision``, ``qwen2_5_vl`` and ``qwen3_vl`` run
#: (chat classes before simple ones; the last also runs the mixtures of experts). Qwen2.5-VL's template has the same
#: system message by default. On Qwen3-VL, lmms-eval fails for a video with fewer than 32 frames; here such a video is
#: treated as on Qwen2.5-VL. The stock processor computes the times that Qwen3-VL reads from the frame indices and the
#: average frame rate that qwen-vl-utils passes to it.
LMMS_EVAL_0_7: Mapping[str, ModelRules] = {
    "llava_onevision": ModelRules(_HELPFUL),
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen3_vl": _QWEN3_0_7,
    "qwen3_vl_moe": _QWEN3_0_7,
}
#: The rules of lmms-eval 0.5.0: the same frames and sizes (it fails for short videos on both Qwen models). The release
#: has no Qwen3-VL; the class that was added later under the same version number, which is also in
#: github.com/xuyang-liu16/VidCom2, branch qwen, sets no system message.
LMMS_EVAL_0_5: Mapping[str, ModelRules] = {
    **LMMS_EVAL_0_7,
    "qwen3_vl": _QWEN3_0_5,
    "qwen3_vl_moe": _QWEN3_0_5,
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The way in which a benchmark's questions are asked and scored.

    Attributes:
        name: for example "lmms-eval-0.7.3".
        prompts: templates by model type, for the types whose template is not ``prompt``.
        models: the rules by model type.
        others: the rules for model types that ``models`` does not list.
        parser: the name of the rule in :mod:`pipeline.evaluate.parsers` that reads a reply.
        reasoning: pairs of tags, removed with the text between them before the rule reads a reply, but not from stored
            answers.
        metric: "questions" for the mean over all questions, or the name of a split for the mean over its values' means.
    """

    name: str
    prompt: PromptTemplate
    prompts: Mapping[str, PromptTemplate] = field(default_factory=dict)
    models: Mapping[str, ModelRules] = field(default_factory=dict)
    others: ModelRules = field(default_factory=ModelRules)
    decoding: Decoding = field(default_factory=lambda: Decoding(max_new_tokens=16))
    parser: str
    reasoning: tuple[tuple[str, str], ...] = ()
    choices: ChoicesMethod = "generate"
    metric: str = QUESTIONS

    def text(self, item: Item, model_type: str) -> str:
        """Return the user's message for a question with its options, without visual tokens and chat template."""
        return self._prompt(model_type).text(item.question, item.options)

    def get_rules(self, model_type: str, family: str | None = None) -> ModelRules:
        """Return the rules for a model type, read by ``family``; None is the family of the model type."""
        return self.models.get(model_type, self.others).adapt_to_family(model_type, family or model_type)

    def describe(self, model_type: str, family: str | None = None) -> JsonObject:
        """Return the protocol for a model type as a JSON-able record, without ``reasoning`` and the decoding seed.

        ``family`` names the family of gstep that reads the model; None is the family of the model type.
        """
        return {
            "protocol": self.name,
            "prompt": asdict(self._prompt(model_type)),
            **self.get_rules(model_type, family).describe(),
            **{name: value for name, value in describe_decoding(self.decoding).items() if name != "seed"},
            "parser": self.parser,
            "choices": self.choices,
            "metric": self.metric,
        }

    def _prompt(self, model_type: str) -> PromptTemplate:
        """Return the template for a model type."""
        return self.prompts.get(model_type, self.prompt)


def make_lmms_eval_protocols(
    prompt: PromptTemplate,
    newer: str,
    older: str,
    newer_prompts: Mapping[str, PromptTemplate] = MappingProxyType({}),
    **shared: Any,
) -> tuple[Protocol, Protocol]:
    """Return a benchmark's protocols of lmms-eval 0.7.3 and 0.5, in this order; only the first has ``reasoning``.

    Args:
        newer, older: the names of the rules that read replies in 0.7.3 and in 0.5.
        newer_prompts: templates by model type that replace ``prompt`` in 0.7.3.
        shared: further fields of both protocols.
    """
    return (
        Protocol(
            name="lmms-eval-0.7.3",
            prompt=prompt,
            prompts=newer_prompts,
            models=LMMS_EVAL_0_7,
            parser=newer,
            reasoning=REASONING,
            **shared,
        ),
        Protocol(name="lmms-eval-0.5", prompt=prompt, models=LMMS_EVAL_0_5, parser=older, **shared),
    )


#: The protocol of users' own questions: asked as ``jobs.generate --questions`` asks, with its frames and reply length.
LETTER = Protocol(
    name="letter",
    prompt=PromptTemplate(f"{{question}}\n{{options}}\n{INSTRUCTION}", "{letter}. {text}"),
    decoding=Decoding(max_new_tokens=64),
    parser="letter",
    reasoning=REASONING,
    choices="letter",
)
