"""The engines that compute answers to prompts, one per file, behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gstep.backbones import ModelSource, Runtime
from gstep.language import Answer, Decoding, Prompt, Score
from gstep.lazy import LazyTable
from gstep.pruners.base import Pruner
from pipeline.generate.answers import AnswersIdentity
from pipeline.options import EngineOptions
from pipeline.rows import JsonObject

TRANSFORMERS, VLLM = "transformers", "vllm"
#: Engine classes by name. Each has ``load``, and ``check`` for errors that can be raised before loading.
ENGINES = LazyTable(
    "engine",
    {
        TRANSFORMERS: "pipeline.generate.engines.transformers:TransformersEngine",
        VLLM: "pipeline.generate.engines.vllm:VllmEngine",
    },
)
#: Default number of questions that a model gets at once: transformers computes whole batches, while vLLM starts new
#: questions as others finish.
BATCH_SIZES = {TRANSFORMERS: 8, VLLM: 256}

# Engine arguments that affect speed, memory and access, but not the answers. A run that failed for lack of memory may
# be resumed with other values.
_NO_ANSWER = frozenset(
    (
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("block_size", "num_gpu_blocks_override", "cpu_offload_gb", "enforce_eager", "enable_prefix_caching"),
        *("enable_chunked_prefill", "async_scheduling", "disable_custom_all_reduce", "download_dir", "hf_token"),
    )
)


def describe_engine(options: EngineOptions) -> AnswersIdentity:
    """Return the engine's entry in the identity of the answers; empty for the transformers engine.

    Engine parameters that affect only speed, memory or access are left out.
    """
    if options.engine == TRANSFORMERS:
        return {}
    params = {name: value for name, value in options.engine_params().items() if name not in _NO_ANSWER}
    return {"engine": {"name": options.engine, **({"params": params} if params else {})}}


def choose_batch_size(options: EngineOptions) -> int:
    """Return the option ``batch_size``, or the engine's default."""
    return options.batch_size or BATCH_SIZES[options.engine]


class Engine(Protocol):
    """A loaded language model that answers and scores prompts."""

    context_length: int
    """Tokens that a prompt and its answer may have together."""

    def batches(self, prompts: Sequence[Prompt], most: int, *, inside: bool = False) -> list[list[int]]:
        """Group the prompts into batches of at most ``most``; return the indices of the prompts in each batch.

        Every batch but the last is as large as ``most`` and the engine's limits allow.

        Args:
            inside: True if the model prunes inside itself for these prompts.
        """

    def generate(
        self, prompts: Sequence[Prompt], decodings: Sequence[Decoding], *, inside: tuple[Pruner, float] | None = None
    ) -> list[Answer]:
        """Answer prompts, which may differ in length and decoding options; return the answers in the same order.

        Args:
            inside: the method that prunes inside the model and the share it keeps; None for no pruning there.
        """

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Sequence[str]],
        *,
        inside: tuple[Pruner, float] | None = None,
    ) -> list[list[Score]]:
        """Compute the log-probability of each continuation of each prompt; return one list of scores per prompt.

        Raises:
            ValueError: a continuation has no token.
        """

    def embedding(self, text: str) -> Tensor:
        """Return the mean input embedding [1,D] float32 of a text's tokens. Raises ValueError if there is no token."""

    def describe(self) -> JsonObject:
        """Return the versions and settings that compute the answers, JSON-able."""

    def close(self) -> None:
        """Release the model."""


class EngineCrashed(Exception):  # noqa: N818
    """An error after which this process can compute nothing more."""


def load_engine(options: EngineOptions, source: ModelSource, runtime: Runtime, largest_video: int = 0) -> Engine:
    """Load the engine that the options name, with its model, which may take minutes.

    Args:
        largest_video: the maximum number of visual tokens of a video in a prompt; only vLLM uses it.

    Raises:
        ModelError: the model cannot be loaded, or the engine cannot run it here.
    """
    engine: Engine = ENGINES[options.engine].load(options, source, runtime, largest_video)
    return engine
