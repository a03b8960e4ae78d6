"""The engine that runs models of transformers, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from gstep.backbones import ModelSource, Runtime
from gstep.language import LanguageModel, Prompt, PromptBuilder, load_language_model
from gstep.language.batch import group_by_cost
from pipeline.generate.late_pruning import LatePruning
from pipeline.options import EngineOptions
from pipeline.rows import JsonObject


class TransformersEngine:
    """The engine that answers with :class:`gstep.language.LanguageModel`."""

    def __init__(self, model: LanguageModel, runtime: Runtime) -> None:
        """Wrap a loaded model."""
        self._model = model
        self._runtime = runtime
        # The signatures are those of :class:`pipeline.generate.engines.Engine`.
        self.generate, self.score, self.embedding = model.generate, model.score, model.embedding
        self.context_length = model.context_length

    @classmethod
    def load(cls, options: EngineOptions, source: ModelSource, runtime: Runtime, largest_video: int) -> Self:
        """Load the model into this process; ``options`` and ``largest_video`` are not used.

        Raises:
            ModelError: the model cannot be loaded.
        """
        return cls(load_language_model(source, runtime), runtime)

    @staticmethod
    def check(
        options: EngineOptions, source: ModelSource, builder: PromptBuilder, prunings: Mapping[str, LatePruning | None]
    ) -> None:
        """Accept every request."""

    def batches(self, prompts: Sequence[Prompt], most: int, *, inside: bool = False) -> list[list[int]]:
        """Group prompts of similar length into batches of at most ``most``, longest first; return each batch's indices.

        A batch also ends at PADDED_TOKENS and at MASK_ELEMENTS, the size of its attention mask. The mask counts only
        the tokens after the videos, or all tokens with ``inside``.
        """
        lengths = [len(prompt) for prompt in prompts]
        return group_by_cost(
            lengths, lengths if inside else [len(prompt) - prompt.prefix_length for prompt in prompts], most
        )

    def describe(self) -> JsonObject:
        """Return the runtime and the model's bytes, JSON-able."""
        return {**self._runtime.describe(), "model_bytes": self._model.n_bytes}

    def close(self) -> None:
        """Do nothing."""
