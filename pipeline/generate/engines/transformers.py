"""transformers' own model, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from gstep.backbones import ModelSource, Runtime
from gstep.language import LanguageModel, Prompt, PromptBuilder, load_language_model
from gstep.language.batch import batches_by_cost
from pipeline.generate.late_pruning import LatePruning
from pipeline.options import EngineOptions
from pipeline.rows import JsonObject


class TransformersEngine:
    """The engine that answers by :class:`gstep.language.LanguageModel`."""

    def __init__(self, model: LanguageModel, runtime: Runtime) -> None:
        self._model = model
        self._runtime = runtime
        # See :class:`pipeline.generate.engines.Engine`.
        self.generate, self.score, self.embedding = model.generate, model.score, model.embedding
        self.context_length = model.context_length

    @classmethod
    def load(cls, options: EngineOptions, source: ModelSource, runtime: Runtime, largest_video: int) -> Self:
        """Load the model, as :func:`pipeline.generate.engines.load_engine`."""
        return cls(load_language_model(source, runtime), runtime)

    @staticmethod
    def check(
        options: EngineOptions, source: ModelSource, builder: PromptBuilder, prunings: Mapping[str, LatePruning | None]
    ) -> None:
        """Accept every request: the engine answers any prompt."""

    def batches(self, prompts: Sequence[Prompt], most: int, *, inside: bool = False) -> list[list[int]]:
        """Return batches by their cost, as :class:`pipeline.generate.engines.Engine`."""
        lengths = [len(prompt) for prompt in prompts]
        return batches_by_cost(
            lengths, lengths if inside else [len(prompt) - prompt.prefix_length for prompt in prompts], most
        )

    def describe(self) -> JsonObject:
        """Return the provenance of answers, as :class:`pipeline.generate.engines.Engine`."""
        return {**self._runtime.describe(), "model_bytes": self._model.n_bytes}

    def close(self) -> None:
        """Leave the model to the end of the process, which frees it."""
