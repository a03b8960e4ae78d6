"""A request to answer questions, checked against questions, cache, model and answers before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from gstep.backbones import ModelSource
from gstep.evidence import HEAD_SOURCES
from gstep.language import Decoding, PromptBuilder, prompt_builder
from pipeline.cache.header import CacheHeader, CacheIdentity, declared_method, differences, fingerprint, read_header
from pipeline.cache.live import INDEX_COLUMNS, LiveVideos, widths_of
from pipeline.cache.reader import TokenOrder, count_tokens
from pipeline.errors import IdentityMismatch, NotAnswers, UsageError, store_usage_errors, usage_errors
from pipeline.generate.answers import (
    HEADER,
    PRUNINGS,
    AnswersIdentity,
    AnswersTable,
    LateIdentity,
    read_answers_header,
)
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import ENGINES, VLLM, EngineSetup
from pipeline.generate.late_pruning import LateAsked, LatePruning, late_pruning
from pipeline.generate.model import check_model, check_tokens, model_of, stored_tower
from pipeline.generate.questions import Way, describe_decoding, given_questions, read_questions
from pipeline.options import EngineOptions
from pipeline.rows import VideoRecord, without_nulls
from pipeline.runner.run_record import check_out, new_run_id
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at

# What is asked of the index of the cache, beside what TokenCache needs of it.
LIVE_COLUMNS = (
    *INDEX_COLUMNS,
    *("error_message", "n_tokens", "n_total", "n_frames", "tokens_per_frame", "hidden_size"),
    *("retention_ratio", "nested"),
)


@dataclass(frozen=True)
class GenerateRequest:
    """A checked request with everything that a run of answering needs; nothing was started yet.

    Attributes:
        held: the identity of the cache.
        live: live rows of those videos of the cache that are asked about, LIVE_COLUMNS; and ``videos`` by their id.
        builder: makes prompts.
        source: the model, the one that the cache was made with.
        questions: QUESTION_SCHEMA.
        store: where the answers go.
        prunings: what tokens are pruned by before they go into a prompt, by name; None leaves them as they are
            stored. Every question is asked under each. The name is "" where there is but one.
        order: of the stored tokens in a prompt, as TokenCache.get takes it.
        about: of what the answers are for, what is part of their identity.
    """

    config: GenerateConfig
    run_id: str
    cache: Store
    held: CacheIdentity
    live: pa.Table
    source: ModelSource
    builder: PromptBuilder
    questions: pa.Table
    store: Store
    prunings: Mapping[str, LatePruning | None]
    order: TokenOrder
    about: AnswersIdentity

    @cached_property
    def videos(self) -> dict[str, VideoRecord]:
        """The live rows of the videos that are asked about, by id."""
        return {row["video_id"]: without_nulls(row, VideoRecord) for row in self.live.to_pylist()}

    @property
    def identity(self) -> AnswersIdentity:
        """The settings that all answers in one place share, JSON-able; PRUNINGS describes each pruning and may grow."""
        stored, late, way = self.held["retention_ratio"], self.prunings.get(""), way_of(self.config)
        identity: AnswersIdentity = {
            "cache": self.held if "" in self.prunings else without_evidence(self.held),
            "model": {"type": self.source.model_type, "weights": self.source.identity},
            "retention_ratio": stored if self.config.retention_ratio is None else self.config.retention_ratio,
            "prompt": {**self.builder.policy.describe(), "order": self._order_policy()},
            "decoding": {"choices": way.method, "system": way.system, **describe_decoding(way.decoding)},
            **engine_of(self.config).describe(),
            **self.about,
        }
        if late is not None:
            identity["pruner"] = late.describe()
        if "" not in self.prunings:
            identity[PRUNINGS] = describe_prunings(self.prunings, self.held)
        return identity

    def _order_policy(self) -> str:
        """Return the order of tokens in prompts, as the answers' identity records it."""
        if "" not in self.prunings:  # more methods may come
            return "own" if self.own_order else "index"
        late = self.prunings[""]
        return "selection" if late is not None and late.pruner.reorders and self.own_order else self.order

    @property
    def own_order(self) -> bool:
        """Return whether a method's own order in a prompt is kept."""
        return self.config.order != "index"

    @property
    def read_ratio(self) -> float | None:
        """The share of tokens that is read from the cache; None reads all."""
        return self.config.retention_ratio if self.prunings.get("", ...) is None else None

    def engine_setup(self) -> EngineSetup:
        """Return the engine's settings, with the size of the largest video to be asked about.

        It looks at the row of every video that can be asked about, under every pruning.
        """
        rows = [row for row in self.videos.values() if answerable(row)]
        sizes = [self.n_visual([row], name) for row in rows for name in self.prunings]
        return replace(engine_of(self.config), largest_video=max(sizes, default=0))

    def n_visual(self, videos: Sequence[VideoRecord], pruning: str = "") -> int:
        """Return the most visual tokens that these videos' rows put into a prompt under a pruning."""
        late, hidden = self.prunings[pruning], self.builder.hidden_size
        if late is not None:
            kept = sum(late.at_most(row["n_frames"], row["tokens_per_frame"], hidden) for row in videos)
        else:
            kept = sum(count_tokens(row, self.read_ratio) for row in videos)
        return kept + (len(videos) if self.builder.needs_newline else 0)


def engine_of(config: EngineOptions) -> EngineSetup:
    """Return the engine setup that the options ask for."""
    return EngineSetup(config.engine, config.tensor_parallel, config.engine_params())


def describe_prunings(
    prunings: Mapping[str, LatePruning | None], held: CacheIdentity
) -> dict[str, LateIdentity | None]:
    """Describe each pruning of a cache, JSON-able, by label; with the pooling head's weights where a method uses it."""
    return {name: None if late is None else _describe(late, held) for name, late in prunings.items()}


def _describe(late: LatePruning, held: CacheIdentity) -> LateIdentity:
    """Describe a pruning of a cache, with the pooling head's weights where it uses that."""
    described = late.describe()
    if HEAD_SOURCES & {late.pruner.sources[name] for name, _ in late.evidence}:
        described["pooling_head"] = held["model"].get("pooling_head")
    return described


def without_evidence(held: CacheIdentity) -> CacheIdentity:
    """Return a cache's identity without its evidence, which does not decide its tokens."""
    rest, model = held.copy(), held["model"].copy()
    rest.pop("evidence", None)
    model.pop("pooling_head", None)
    dtype = {name: value for name, value in held["dtype"].items() if name != "evidence"}
    return {**rest, "model": model, "dtype": dtype}


def prepare(config: GenerateConfig, console: Console, given: object = None) -> GenerateRequest:
    """Check the whole request. Raises UsageError, and CorruptShard where the cache was damaged; starts nothing.

    ``given`` are questions that a caller has at hand, as of ``given_questions``; None where the options name a file.
    """
    objects = Objects.from_environment(config.s3_endpoint, config.s3_region)
    way = way_of(config)
    assert config.questions  # the config refuses a request without
    with store_usage_errors():
        if given is None:
            questions = read_questions(config.questions, way, objects, config.limit)
        else:
            questions = given_questions(given, way, config.limit)
    return checked(config, questions, {"": asked_for(config)}, console)


def asked_for(config: GenerateConfig) -> LateAsked | None:
    """Return the pruning that the options name, or None."""
    if config.pruner is None:
        return None
    assert config.retention_ratio is not None  # the config refuses a method without
    return LateAsked(config.pruner, config.retention_ratio, config.pruner_params(), config.siglip, config.pruner_seed)


def _prunings(
    config: GenerateConfig,
    asked: Mapping[str, LateAsked | None],
    held: CacheIdentity,
    source: ModelSource,
    builder: PromptBuilder,
) -> dict[str, LatePruning | None]:
    """Return the requested prunings by name, each checked against the cache and the engine. Raises UsageError."""
    with usage_errors():
        prunings = {
            name: None if one is None else late_pruning(one, held, source, builder) for name, one in asked.items()
        }
        ENGINES[config.engine].check(engine_of(config), source, builder, prunings)
    takes_siglip = any(late is not None and late.text_tower is not None for late in prunings.values())
    if config.siglip is not None and not takes_siglip:
        raise UsageError("--siglip: no method that is asked takes anything from a SigLIP checkpoint here")
    return prunings


def checked(
    config: GenerateConfig,
    questions: pa.Table,
    asked: Mapping[str, LateAsked | None],
    console: Console,
    about: AnswersIdentity | None = None,
) -> GenerateRequest:
    """Check a request to ask questions, each under every pruning that is ``asked``.

    ``questions`` is QUESTION_SCHEMA; the request is held against cache, model and answers. Raises as ``prepare``.
    """
    objects = Objects.from_environment(config.s3_endpoint, config.s3_region)
    cache, store = store_at(config.cache, objects), store_at(config.out, objects)
    check_out(store)
    with store_usage_errors():
        header = read_header(cache)
        ids = pc.unique(pc.list_flatten(questions["video_ids"])).to_pylist()
        live = LiveVideos.open(cache, fingerprint(header["identity"])).of(ids, LIVE_COLUMNS)
        _check_free(store)
    held = header["identity"]
    source, builder = _resolved(config, cache, header)
    check_tokens(cache, header, widths_of(live), builder)
    prunings = _prunings(config, asked, held, source, builder)
    request = GenerateRequest(
        config=config,
        run_id=new_run_id(),
        cache=cache,
        held=held,
        live=live,
        source=source,
        builder=builder,
        questions=questions,
        store=store,
        prunings=prunings,
        order=_order(config, held, prunings),
        about=about or AnswersIdentity(),
    )
    _check_ratio(request)
    _check_context(request, console)
    with store_usage_errors():
        match_answers(request)
    return request


def _resolved(config: GenerateConfig, cache: Store, header: CacheHeader) -> tuple[ModelSource, PromptBuilder]:
    """Return the model that made the cache, or for vLLM one with its vision encoder, and its prompt builder.

    Raise UsageError if another one was asked for.
    """
    held, vllm = header["identity"]["model"], config.engine == VLLM
    with usage_errors(), store_usage_errors():
        named = model_of(config.model, config.revision, held["weights"])
        source = ModelSource.resolve(*named, quantized=vllm)
        check_model(cache, held, source, partial(stored_tower, cache, header) if vllm else None)
        positions = None if config.positions == "auto" else config.positions
        return source, prompt_builder(source, positions, config.rule, config.frame_times)


def _check_free(store: Store) -> None:
    """Raise UsageError if the place for answers holds something else."""
    if not store.exists(HEADER) and store.taken():
        raise NotAnswers(f"{store} exists and holds no answers (it has no {HEADER}): name an empty place with --out")


def way_of(config: GenerateConfig) -> Way:
    """Return the run's default way of answering, from its options."""
    with usage_errors():
        decoding = Decoding(config.max_new_tokens, config.temperature, config.top_p, config.top_k, config.seed)
    return Way(decoding, config.choices, config.system)


def match_answers(request: GenerateRequest) -> None:
    """Raise IdentityMismatch if the place holds answers of other settings; a place without an answer is free."""
    if not request.store.exists(HEADER):
        return
    held = read_answers_header(request.store)["identity"]
    if AnswersTable(request.store).names():
        refuse_others(request.store, held, request.identity)


def refuse_others(store: Store, held: AnswersIdentity, wanted: AnswersIdentity) -> None:
    """Raise IdentityMismatch if answers of identity ``held`` cannot be mixed with ``wanted`` ones.

    Whatever differs counts, but for prunings that only one of the two has.
    """
    if PRUNINGS in held and PRUNINGS in wanted:
        both = held[PRUNINGS].keys() & wanted[PRUNINGS].keys()
        held = {**held, PRUNINGS: {name: held[PRUNINGS][name] for name in both}}
        wanted = {**wanted, PRUNINGS: {name: wanted[PRUNINGS][name] for name in both}}
    if wrong := differences(held, wanted, has="the answers have"):
        raise IdentityMismatch(
            f"{store} holds answers made with other settings, and one place holds one kind:\n  "
            + "\n  ".join(wrong)
            + "\nUse the settings of the answers, or another --out."
        )


def _order(config: GenerateConfig, held: CacheIdentity, prunings: Mapping[str, LatePruning | None]) -> TokenOrder:
    """Return the order of stored tokens in prompts. Raise UsageError for ``--order own`` of a method without one."""
    declared = declared_method(held)
    own = declared is not None and declared.reorders
    late = any(late is not None and late.pruner.reorders for late in prunings.values())
    if config.order == "own" and not (own or late):
        raise UsageError(
            f"--order own: {config.pruner or held['pruner']['method']}, which prunes the tokens, has no order of its "
            "own in a prompt"
        )
    return "selection" if own and config.order != "index" else "index"


def _check_ratio(request: GenerateRequest) -> None:
    """Raise UsageError if the cache cannot serve the ratio; smaller ones than stored need a nested method."""
    ratio, stored = request.read_ratio, request.held["retention_ratio"]
    if ratio is None:
        return
    if ratio > stored + 1e-9:
        raise UsageError(f"--retention-ratio {ratio}: the cache stores {stored}; prune into another --out for more")
    with usage_errors():
        for row in filter(answerable, request.videos.values()):
            count_tokens(row, ratio)


def _check_context(request: GenerateRequest, console: Console) -> None:
    """Print a note about prompts whose visual tokens alone exceed the context; raise UsageError if all do."""
    videos = request.videos
    sizes = [
        request.n_visual([videos[video_id] for video_id in ids], pruning)
        for ids in request.questions["video_ids"].to_pylist()
        if all(answerable(videos.get(video_id)) for video_id in ids)
        for pruning in request.prunings
    ]
    context = request.builder.context_length
    long = [size for size in sizes if size > context]
    if not long:
        return
    what = f"{len(long)} of {len(sizes)} prompts have up to {max(long)} visual tokens, and the model takes {context}"
    if len(long) == len(sizes):
        raise UsageError(f"{what} tokens with the answer: lower --retention-ratio")
    console.print(f"note: {what}: they become rows of class prompt-too-long", highlight=False, markup=False)


def answerable(row: VideoRecord | None) -> bool:
    """Return whether a video's live row has tokens."""
    return row is not None and row["status"] == "ok"
