"""The language half of each model family: building prompts from cached visual tokens, and answering them.

Your own model takes a :class:`~gstep.language.batch.Batch` of prompts and
:func:`~gstep.language.batch.encoder_outputs`, as in ``pipeline/examples/own_llm.py``. Only the names in ``__all__`` are
public. They are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gstep.backbones import find_family
from gstep.errors import ModelError
from gstep.families import FAMILIES, GENERIC
from gstep.lazy import LazyTable, load_object, make_getattr

if TYPE_CHECKING:
    from gstep.backbones import ModelSource, Runtime
    from gstep.language.batch import Batch, encoder_outputs
    from gstep.language.model import LanguageModel
    from gstep.language.prompt import PromptBuilder
    from gstep.language.types import Answer, Decoding, Prompt, PromptPolicy, Score
    from gstep.types import Visual

#: The prompt builders of the families in the table, by model type, without that of GENERIC.
BUILDERS = LazyTable(
    "model type", {name: family.prompts for name, family in FAMILIES.items() if family.prompts and name != GENERIC}
)

_PUBLIC = LazyTable(
    "name",
    {
        "Answer": "gstep.language.types:Answer",
        "Batch": "gstep.language.batch:Batch",
        "Decoding": "gstep.language.types:Decoding",
        "LanguageModel": "gstep.language.model:LanguageModel",
        "Prompt": "gstep.language.types:Prompt",
        "PromptBuilder": "gstep.language.prompt:PromptBuilder",
        "PromptPolicy": "gstep.language.types:PromptPolicy",
        "Score": "gstep.language.types:Score",
        "Visual": "gstep.types:Visual",
        "encoder_outputs": "gstep.language.batch:encoder_outputs",
    },
)

__all__ = [
    "BUILDERS",
    "Answer",
    "Batch",
    "Decoding",
    "LanguageModel",
    "Prompt",
    "PromptBuilder",
    "PromptPolicy",
    "Score",
    "Visual",
    "encoder_outputs",
    "load_language_model",
    "prompt_builder",
]


def prompt_builder(
    source: ModelSource,
    positions: str | None = None,
    rule: str = "transformers-5",
    frame_times: str = "true",
    thought: str = "open",
) -> PromptBuilder:
    """Make the prompt builder of a model from its config, tokenizer and chat template, without weights.

    Args:
        positions: "contiguous" or "original"; None uses the family's default (contiguous, but original on Qwen).
        rule, frame_times, thought: fields of :class:`~gstep.language.types.PromptPolicy`.

    Raises:
        ModelError: a file or token that prompts need is missing or not valid, or the family cannot answer questions.
        ValueError: a policy value is unknown or does not apply to the generic family, or ``thought`` is "closed" and
            the template takes no question without a video.
    """
    builder: PromptBuilder = load_object(_find_prompts_path(source)).of(source, positions, rule, frame_times, thought)
    return builder


def load_language_model(source: ModelSource, runtime: Runtime) -> LanguageModel:
    """Load a model without its vision part, ready to answer.

    Raises:
        ModelError: the family cannot answer questions; weights are missing, quantized or of another shape; another file
            cannot be loaded; or transformers is too old.
    """
    _find_prompts_path(source)  # raises for a family that answers no questions
    model: LanguageModel = load_object(find_family(source.family).language_model).load(source, runtime)
    return model


def _find_prompts_path(source: ModelSource) -> str:
    """Return the import path of the model's prompt builder; ModelError for a family that cannot answer."""
    path = find_family(source.family).prompts
    if path is not None:
        return path
    if source.family in FAMILIES:
        remedy = f"prune with --family {GENERIC}, which can answer"
    else:
        remedy = "give the class of the family the attribute prompts = 'module:Class' of its prompt builder"
    raise ModelError(
        f"{source.name!r}: the family {source.family} cannot answer questions, its videos can only be pruned and "
        f"cached: {remedy}"
    )


if not TYPE_CHECKING:  # hidden from type checkers: to them every unknown attribute would look like a valid one
    __getattr__ = make_getattr(__name__, _PUBLIC)
