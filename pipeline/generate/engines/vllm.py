"""The vLLM engine: continuous batching, and a prefix cache that questions on one video share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from gstep.backbones import ModelSource, Runtime, choose_runtime
from gstep.errors import ModelError
from gstep.language import BUILDERS, Answer, Decoding, Prompt, PromptBuilder, Score
from gstep.language.prompt import load_tokenizer, tokenize_text
from gstep.language.types import read_placeholder
from gstep.language.weights import InputEmbeddings, read_generation_config
from gstep.pruners.base import Pruner
from gstep.serving import find_vllm_version
from gstep.serving.options import (
    RESERVED_OPTIONS,
    check_connectors,
    check_cpu_support,
    check_generation_settings,
    check_video_fits,
    make_engine_options,
    make_sampling_params,
    prepare_process,
)
from gstep.serving.prompts import make_engine_input
from pipeline.errors import UsageError
from pipeline.generate.engines import EngineCrashed
from pipeline.generate.late_pruning import LatePruning
from pipeline.options import EngineOptions
from pipeline.rows import JsonObject

if TYPE_CHECKING:
    from vllm import RequestOutput

SUPPORTED_VERSIONS = ">=0.32,<0.33"
# Engine arguments that limit the size of a video.
_SIZES = ("max_num_batched_tokens", "max_model_len", "mm_processor_kwargs")
_MAX_IDS_PER_REQUEST = 100  # log-probabilities per request; vLLM allows 128


class VllmEngine:
    """The engine that answers with vLLM's ``LLMEngine`` in this process.

    Attributes:
        context_length: the tokens that a prompt and its answer may have together.
        reused_tokens: the number of prompt tokens that were found in the prefix cache so far.
        first_token_s: the seconds to the first token of each request of the last ``generate``.
    """

    def __init__(self, engine: Any, source: ModelSource, runtime: Runtime, tensor_parallel: int) -> None:
        """Wrap a started LLMEngine, and load the model's tokenizer, input embeddings and generation settings."""
        config = source.parse_stock_config()
        self._engine = engine
        self._runtime = runtime
        self._tensor_parallel = tensor_parallel
        self._tokenizer = load_tokenizer(source)
        self._embeddings = InputEmbeddings(source, self._tokenizer, runtime.dtype)
        self._video_token = read_placeholder(config)[1]
        self._generation = read_generation_config(source, config)
        self._n_requests = 0
        # A waiting request keeps its prompt in memory, so only as many wait as the scheduler needs to stay busy.
        self._most_waiting = 2 * int(engine.vllm_config.scheduler_config.max_num_seqs)
        self.reused_tokens = 0
        self.first_token_s: list[float] = []
        self.context_length = int(engine.vllm_config.model_config.max_model_len)

    @classmethod
    def load(cls, options: EngineOptions, source: ModelSource, runtime: Runtime, largest_video: int) -> Self:
        """Start vLLM's engine with its model, which may take minutes; vLLM's own errors are passed on.

        Sets vLLM's environment variables in this process and imports vLLM. ``engine_params`` of the options replace the
        default arguments.

        Raises:
            ModelError: the largest video does not fit, this CPU cannot run the model, or several GPUs are used and this
                package is not installed.
        """
        check_cpu_support(source, runtime)
        prepare_process(runtime.device, options.tensor_parallel)
        from vllm import EngineArgs  # noqa: PLC0415 - tens of seconds to import
        from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        arguments = make_engine_options(source, runtime, largest_video, options.tensor_parallel)
        arguments |= options.engine_params()
        engine_args = EngineArgs(**arguments)
        check_video_fits(engine_args, largest_video)
        # The limits of offline use: throughput before latency.
        engine = LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)
        return cls(engine, source, runtime, options.tensor_parallel)

    @staticmethod
    def check(
        options: EngineOptions, source: ModelSource, builder: PromptBuilder, prunings: Mapping[str, LatePruning | None]
    ) -> None:
        """Raise an error if vLLM is missing or cannot answer this request; no model is loaded.

        If there are engine parameters, vLLM is imported and its environment variables are set in this process.

        Raises:
            UsageError: vLLM is missing or not a tested version; the model's family, a pruning inside the model or the
                positions are not supported; or an engine parameter is unknown or reserved.
            ModelError: generation settings of the checkpoint, or a KV connector, are not supported.
        """
        if source.family not in BUILDERS:
            raise UsageError(
                f"--engine vllm: vLLM has no class that takes cached tokens of {source.model_type} (family "
                f"{source.family}): use --engine transformers"
            )
        inside = [name or late.pruner.name for name, late in prunings.items() if late and late.inside]
        if inside:
            raise UsageError(
                f"--engine vllm: {', '.join(inside)} prunes inside the language model, by attention that vLLM's "
                "kernels do not return: use --engine transformers"
            )
        positions = {builder.policy.positions, *(late.positions for late in prunings.values() if late)}
        if builder.axes == 1 and "original" in positions:
            raise UsageError(
                "--engine vllm: vLLM itself counts the positions of this model: --positions original needs --engine "
                "transformers"
            )
        check_generation_settings(source.name, read_generation_config(source, builder.config))
        params = options.engine_params()
        check_connectors(params)
        check_installed("--engine vllm")
        if params:
            refuse_reserved(params)
            prepare_process("cpu", 1)
            from vllm import EngineArgs  # noqa: PLC0415 - as above

            if unknown := sorted(params.keys() - {item.name for item in fields(EngineArgs)}):
                raise UsageError(f"--engine-param {unknown[0]}: vLLM {find_vllm_version()} has no such engine argument")

    @staticmethod
    def check_memory(options: EngineOptions, source: ModelSource, largest_video: int) -> None:
        """Raise ModelError if ``max_num_batched_tokens`` is too small for the largest video.

        Does nothing if it is not set, or if this node (which may lack the workers' GPUs) cannot tell; workers check it
        again. Otherwise vLLM is imported and its environment variables are set in this process.
        """
        params = options.engine_params()
        if "max_num_batched_tokens" not in params:
            return
        prepare_process("cpu", 1)
        from vllm import EngineArgs  # noqa: PLC0415 - as above

        arguments = make_engine_options(source, choose_runtime("cpu", "bfloat16"), largest_video)
        arguments |= {name: params[name] for name in _SIZES if name in params}
        try:
            check_video_fits(EngineArgs(**arguments), largest_video)
        except ModelError:
            raise
        except Exception:  # noqa: BLE001 - a node without GPUs cannot check every model; the workers check again
            return

    def batches(self, prompts: Sequence[Prompt], most: int, *, inside: bool = False) -> list[list[int]]:
        """Split the prompts into groups of ``most`` (the last may be smaller): lists of indices in the given order.

        ``inside`` is not used.
        """
        return [list(range(start, min(start + most, len(prompts)))) for start in range(0, len(prompts), most)]

    def generate(
        self, prompts: Sequence[Prompt], decodings: Sequence[Decoding], *, inside: tuple[Pruner, float] | None = None
    ) -> list[Answer]:
        """Answer prompts; return the answers in the same order. ``inside`` must be None.

        Times are those of the whole batch: until every prompt had its first token, and from there on. Sets
        ``first_token_s``.

        Raises:
            ValueError: vLLM refuses a prompt.
            EngineCrashed: the engine failed.
        """
        assert inside is None
        start = time.monotonic()
        params = [make_sampling_params(decoding, self._generation) for decoding in decodings]
        outputs = self._run(prompts, params)
        self.first_token_s = [float(output.metrics.first_token_latency) for output in outputs]
        prefill_s = max(self.first_token_s)
        decode_s = max(0.0, time.monotonic() - start - prefill_s)
        return [self._answer(output.outputs[0], prefill_s, decode_s) for output in outputs]

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Sequence[str]],
        *,
        inside: tuple[Pruner, float] | None = None,
    ) -> list[list[Score]]:
        """Compute the log-probability of each continuation, in a list per prompt. ``inside`` must be None.

        Continuations that begin alike share requests, each of which asks for all tokens that may follow one beginning.
        The letters of a question are a single request.

        Raises:
            ValueError: vLLM refuses a prompt, or a continuation has no token.
            EngineCrashed: the engine failed.
        """
        assert inside is None
        ids = [[tokenize_text(self._tokenizer, text) for text in texts] for texts in continuations]
        requests = [(row, *group) for row, sequences in enumerate(ids) for group in _group_next_tokens(sequences)]
        longer = [_append_tokens(prompts[row], beginning) for row, beginning, _ in requests]
        params = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": None}
        outputs = self._run(longer, [{**params, "logprob_token_ids": following} for _, _, following in requests])
        log_probs: dict[tuple[int, tuple[int, ...], int], float] = {}
        for (row, beginning, following), output in zip(requests, outputs, strict=True):
            logprobs = output.outputs[0].logprobs[0]
            log_probs |= {(row, beginning, token): float(logprobs[token].logprob) for token in following}
        return [
            [
                Score(sum(log_probs[row, tuple(text[:i]), token] for i, token in enumerate(text)), len(text))
                for text in sequences
            ]
            for row, sequences in enumerate(ids)
        ]

    def embedding(self, text: str) -> Tensor:
        """Return the mean input embedding [1,D] of a text's tokens. Raises ValueError if there is no token."""
        return self._embeddings.mean(text).to(self._runtime.device)

    def describe(self) -> JsonObject:
        """Return vLLM's version, the tensor parallelism and the runtime, JSON-able."""
        parallel = {"tensor_parallel": self._tensor_parallel}
        return {**self._runtime.describe(), "attn_implementation": "vllm", "vllm": find_vllm_version(), **parallel}

    def forget(self) -> None:
        """Clear the prefix and encoder caches."""
        self._engine.reset_prefix_cache()
        self._engine.reset_encoder_cache()

    @property
    def client(self) -> Any:
        """The client of vLLM's engine core."""
        return self._engine.engine_core

    def close(self) -> None:
        """Stop the engine and its worker processes."""
        self.client.shutdown()

    def _run(self, prompts: Sequence[Prompt], params: Sequence[Mapping[str, Any]]) -> list[RequestOutput]:
        """Run the prompts with these SamplingParams; return vLLM's outputs in order, and add to ``reused_tokens``.

        Raises:
            ValueError: vLLM refuses a prompt; requests that are still running are aborted.
            EngineCrashed: the engine failed.
        """
        from vllm import SamplingParams  # noqa: PLC0415 - as above
        from vllm.exceptions import VLLMValidationError  # noqa: PLC0415

        names = [f"{self._n_requests + i}" for i in range(len(prompts))]
        self._n_requests += len(prompts)
        waiting: dict[str, str] = {}  # requests in the engine: our name -> the name that the engine gave
        results: dict[str, RequestOutput] = {}
        for name, prompt, sampling in zip(names, prompts, params, strict=True):
            try:
                request = make_engine_input(prompt, self._video_token)
                waiting[name] = self._engine.add_request(name, request, SamplingParams(**sampling))
            except (ValueError, VLLMValidationError) as error:
                self._engine.abort_request(list(waiting.values()), internal=True)
                raise ValueError(str(error)) from error
            while len(waiting) >= self._most_waiting:
                self._step(waiting, results)
        while waiting:
            self._step(waiting, results)
        outputs = [results[name] for name in names]
        self.reused_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
        return outputs

    def _step(self, waiting: dict[str, str], results: dict[str, RequestOutput]) -> None:
        """Run one engine step, and move finished requests from ``waiting`` to ``results``, in place.

        Raises:
            EngineCrashed: the step failed.
        """
        try:
            outputs = self._engine.step()
        except Exception as error:  # an error leaves the engine's scheduler in an unknown state
            raise EngineCrashed(f"vLLM: {type(error).__name__}: {error}") from error
        for output in (output for output in outputs if output.finished):
            results[output.request_id] = output
            del waiting[output.request_id]

    def _answer(self, output: Any, prefill_s: float, decode_s: float) -> Answer:
        """Convert a finished output to an Answer, whose text leaves out special tokens.

        Its ``finish`` is "stop" if an end token ended it, which is dropped, and otherwise "length".
        """
        ids = list(output.token_ids)
        is_stopped = output.finish_reason == "stop"
        if is_stopped:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(text, tuple(ids), "stop" if is_stopped else "length", prefill_s, decode_s)


def _group_next_tokens(texts: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield (beginning, next tokens) for all beginnings of tokenized texts, so that each token of each text is covered.

    The beginnings are all prefixes that a token follows, from the empty one on, also those of one text only, in order
    of first occurrence; each has the distinct tokens that follow it in any text. One with more than
    ``_MAX_IDS_PER_REQUEST`` (100) next tokens is yielded several times.
    """
    tokens: dict[tuple[int, ...], dict[int, None]] = {}
    for text in texts:
        for i, token in enumerate(text):
            tokens.setdefault(tuple(text[:i]), {})[token] = None
    for beginning, following in tokens.items():
        ids = list(following)
        for start in range(0, len(ids), _MAX_IDS_PER_REQUEST):
            yield beginning, ids[start : start + _MAX_IDS_PER_REQUEST]


def _append_tokens(prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """Return a copy of the prompt followed by the text tokens ``ids``, at the next positions."""
    if not ids:
        return prompt
    start = prompt.positions[:, -1:] + 1
    return replace(
        prompt,
        input_ids=torch.cat([prompt.input_ids, torch.tensor(ids)]),
        positions=torch.cat([prompt.positions, start + torch.arange(len(ids))], dim=1),
    )


def check_installed(flag: str) -> None:
    """Raise UsageError unless a tested version of vLLM is installed; ``flag`` is named in the error."""
    installed_version = find_vllm_version()
    if installed_version is None:
        raise UsageError(
            f"{flag}: vLLM is not installed here; it needs its own environment (vllm{SUPPORTED_VERSIONS}, on every "
            "node): pip install -e '.[vllm]'"
        )
    if installed_version not in SpecifierSet(SUPPORTED_VERSIONS, prereleases=True):
        raise UsageError(
            f"{flag}: vLLM {installed_version} is installed here: install a tested version ({SUPPORTED_VERSIONS})"
        )


def refuse_reserved(
    params: JsonObject,
    reserved_names: Set[str] = RESERVED_OPTIONS,
    origin: str = "the cache, the model and the other flags",
) -> None:
    """Raise UsageError if an engine argument is reserved, because this project sets it from its ``origin``."""
    if refused_names := sorted(params.keys() & reserved_names):
        raise UsageError(f"--engine-param {refused_names[0]}: it follows from {origin}")
