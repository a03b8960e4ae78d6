"""A request to evaluate, checked before anything is started: questions, protocol, model, methods, what is there.

Answers come from a cache of all tokens. An evaluation makes the cache with the protocol's frames, or reads one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from rich.console import Console

from gstep.backbones import ModelSource, family_of
from gstep.evidence import HEAD_SOURCES, name_source_pairs
from gstep.language import PromptBuilder, prompt_builder
from gstep.methods import METHODS
from gstep.pruners import find_method
from pipeline.cache.changed_code import REDO
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.header import (
    HEADER,
    CacheIdentity,
    fingerprint,
    identify_model,
    list_differences,
    read_header,
    read_header_file,
    serialise_header,
)
from pipeline.cache.live import LiveVideos, select_removed
from pipeline.cache.reader import TokenCache
from pipeline.cache.schema import digest
from pipeline.console import Say, speaker
from pipeline.errors import IdentityMismatch, NotACache, NotResults, UsageError, store_usage_errors, usage_errors
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.benchmarks.items import LoadedQuestions
from pipeline.evaluate.benchmarks.own import OwnQuestions
from pipeline.evaluate.config import ANSWERS_FOLDER, CACHE_FOLDER, RESULTS_HEADER, EvaluateConfig
from pipeline.evaluate.protocols import FrameRule, ModelRules, Protocol
from pipeline.evaluate.scores import question_table
from pipeline.generate.answers import HEADER as ANSWERS_HEADER
from pipeline.generate.answers import (
    PRUNINGS,
    AnswersIdentity,
    LateIdentity,
    MatchedIdentity,
    match_answers,
    read_answers_header,
)
from pipeline.generate.engines import ENGINES, describe_engine
from pipeline.generate.late_pruning import PruningSpec, describe_prunings, is_whole, resolve_pruning
from pipeline.generate.model import check_model, choose_family, choose_model
from pipeline.generate.questions import refuse_placeholders
from pipeline.generate.removal import read_barred
from pipeline.generate.request import drop_evidence
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import list_needed_evidence, make_sampling, resolve, sampling_settings
from pipeline.rows import Json, JsonObject
from pipeline.runner.run_record import check_out
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at
from pipeline.video.sampling import ROUND_EVEN, TRUNCATE

#: The prunings under which every question is asked, by label; None is full retention.
Grid = Mapping[str, PruningSpec | None]
#: Minimum tokens for a reply of a model whose chat template opens a thought.
MIN_THOUGHT_TOKENS = 2048
_RESULTS_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """A checked request to evaluate.

    Attributes:
        questions: QUESTION_SCHEMA.
        store: where the results go.
        cache: the cache of all tokens.
        thought: "closed" where --close-thought closes a tag that the chat template opens, else "open".
        videos: how jobs.prune makes that cache, without its manifest; None where it is there and only read.
        answers: the settings of the answers that decide which of them count.
    """

    config: EvaluateConfig
    benchmark: Benchmark
    protocol: Protocol
    loaded: LoadedQuestions
    source: ModelSource
    grid: Grid
    thought: str
    questions: pa.Table
    store: Store
    cache: str
    videos: PruneConfig | None
    objects: Objects
    answers: MatchedIdentity

    @property
    def identity(self) -> JsonObject:
        """The settings that all results in one folder share, JSON-able."""
        frames = frame_options(self.config, self.protocol, self.source)
        by_time: JsonObject = {"frames": frames, "pixels": None} if "fps" in frames else {}
        thought_entry: JsonObject = {"thought": self.thought} if self.thought == "closed" else {}
        return {
            "benchmark": self.benchmark.name,
            "model": cast(JsonObject, identify_model(self.source)),
            "num_frames": frames.get("num_frames"),
            **self.protocol.describe(self.source.model_type, self.source.family),
            **by_time,
            **thought_entry,
        }

    @property
    def token_bytes(self) -> int | None:
        """The bytes that a cache in bfloat16 stores for a token and its deepstack levels; None if no config says it."""
        config = self.source.config  # the weights may be gone once every question is answered
        width = (config.get("text_config") or config).get("hidden_size")
        levels = len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
        return BFLOAT16.token_bytes(width, levels) if width else None

    @property
    def names(self) -> dict[str, str]:
        """The own names of methods from elsewhere by import path; a name that another method has too is left out.

        Imports the modules of these methods.
        """
        kinds = {
            spec.method: find_method(spec.method) for spec in self.grid.values() if spec and spec.method not in METHODS
        }
        names = Counter([*METHODS, *(kind.name for kind in kinds.values())])
        return {path: kind.name for path, kind in kinds.items() if names[kind.name] == 1}

    @property
    def about(self) -> JsonObject:
        """The facts that results may differ in: names, a hash of the questions, the bytes of a cached token."""
        questions = [
            [item.question_id, item.question, item.options, item.expected, *filter(None, [item.conversation])]
            for item in self.loaded.items
        ]
        annotations = digest(json.dumps(sorted(questions, key=str)).encode())
        names: JsonObject = {"names": self.names} if self.names else {}
        return {"model": self.source.name, "annotations": annotations, "token_bytes": self.token_bytes, **names}

    @property
    def title(self) -> str:
        """The title of tables and page: benchmark and model."""
        return f"{self.benchmark.title}, {self.source.name}"


def _read_cache_identity(cache_store: Store, *, is_named: bool) -> CacheIdentity | None:
    """Return the identity of the cache, or None where there is none yet.

    Raises NotACache if the place holds something else, but only if the user named it (``is_named``).
    """
    with store_usage_errors():
        identity = read_header(cache_store)["identity"] if cache_store.exists(HEADER) else None
        if identity is None and is_named and cache_store.has_other_files():
            raise NotACache(f"--cache {cache_store} exists and is no cache (it has no {HEADER}): name an empty place")
    return identity


def prepare(config: EvaluateConfig, console: Console) -> EvaluateRequest:
    """Check the whole request and return it. Starts nothing; reads no weights and no video.

    Prints notes, such as questions whose videos the cache lacks. Raises UsageError.
    """
    assert config.benchmark is not None  # the config refuses a request without it
    objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
    store, cache, say = store_at(config.out, objects), config.cache or config.in_out(CACHE_FOLDER), speaker(console)
    check_out(store)
    cache_store = store_at(cache, objects)
    cache_identity = _read_cache_identity(cache_store, is_named=config.cache is not None)
    source = _model(config, cache_identity)
    benchmark = find_benchmark(config.benchmark).open(source.model_type, config.data, say)
    protocol = benchmark.protocol(config.protocol)
    if config.max_new_tokens is not None:
        protocol = replace(protocol, decoding=replace(protocol.decoding, max_new_tokens=config.max_new_tokens))
    questions = benchmark.load(config.data, [*map(Path, config.video_root)]).first(config.limit)
    answers_store = store_at(config.in_out(ANSWERS_FOLDER), objects)
    questions = _leave_removed(questions, answers_store, say)
    if cache_identity is not None:
        check_model(cache_store, cache_identity["model"], source)
    if config.data is None and cache_identity is not None:
        _note_uncached(questions, cache_store, say)
    with usage_errors():
        builder = prompt_builder(source, thought="closed" if config.close_thought else "open")
    _check_thought(protocol, questions, source, builder)
    table = question_table(questions.items, protocol, source.model_type)
    if isinstance(benchmark, OwnQuestions):
        refuse_placeholders(table, builder, benchmark.files[0])
    grid = _arms(config, source, builder, answers_store)
    videos = plan_missing_videos(config, grid, protocol, source, cache, cache_identity)
    if videos is not None:
        cache_identity = identify_cache(videos, cache_store, objects, console)
    elif cache_identity is not None:
        check_frames(config, protocol, source, cache, cache_identity)
    answers = _match_answers(config, answers_store, _require_whole(cache_identity, cache), grid, source, builder)
    request = EvaluateRequest(
        config=config,
        benchmark=benchmark,
        protocol=protocol,
        loaded=questions,
        source=source,
        grid=grid,
        thought=builder.policy.thought,
        questions=table,
        store=store,
        cache=cache,
        videos=videos,
        objects=objects,
        answers=answers,
    )
    with store_usage_errors():
        match_results(store, request.identity)
    return request


def _leave_removed(questions: LoadedQuestions, answers: Store, say: Say) -> LoadedQuestions:
    """Return the questions that are about no video removed from the results, and say how many are left out.

    Raises UsageError if none is left.
    """
    with store_usage_errors():
        barred = read_barred(answers)
    items = tuple(item for item in questions.items if barred.keys().isdisjoint(item.video_ids))
    if n_removed := len(questions.items) - len(items):
        line = f"{n_removed} of {len(questions.items)} questions are about videos that were removed from the results"
        if not items:
            raise UsageError(f"{line}: none is left")
        say(f"note: {line}: they are left out")
    return replace(questions, items=items)


def _note_uncached(questions: LoadedQuestions, place: Store, say: Say) -> None:
    """Say how many questions are about videos that the cache in ``place`` lacks, if any: they will count as wrong.

    Questions about removed videos are not scored.
    """
    with store_usage_errors():
        cache = TokenCache(str(place), store=place)
        absent_ids = {name for item in questions.items for name in item.video_ids if name not in cache}
        if not absent_ids:
            return
        rows = LiveVideos.open(place, fingerprint(cache.identity)).rows_of(absent_ids, ("video_id", "status"))
    absent_ids.difference_update(select_removed(rows)["video_id"].to_pylist())
    if absent := [(item, name) for item in questions.items for name in item.video_ids if name in absent_ids]:
        n_questions = len({item.question_id for item, _ in absent})
        say(
            f"note: {n_questions} of {len(questions.items)} questions are about videos that {place} lacks, e.g. "
            f"{absent[0][1]!r} of {absent[0][0].question_id}: they will fail, and count as wrong"
        )


def match_results(store: Store, identity: JsonObject) -> None:
    """Raise UsageError if the place holds results of another identity, or something else; an empty place is fine."""
    if not store.exists(RESULTS_HEADER):
        if store.has_other_files():
            raise NotResults(f"{store} exists and holds no results (it has no {RESULTS_HEADER}): name an empty place")
        return
    header = read_results_header(store)
    requested = json.loads(json.dumps(identity))
    if wrong := list_differences(cast(JsonObject, header["identity"]), requested, old_subject="the results have"):
        raise IdentityMismatch(
            f"{store} holds results of other settings, and one place holds one kind:\n  "
            + "\n  ".join(wrong)
            + "\nUse the settings of the results, or another --out."
        )


def read_results_header(store: Store) -> dict[str, Json]:
    """Read the header of a results folder. Raises NotResults."""
    absent = f"no results of python -m jobs.evaluate --benchmark (no {RESULTS_HEADER})"
    return read_header_file(store, RESULTS_HEADER, (_RESULTS_VERSION,), NotResults, absent, of="results of ")


def write_results_header(store: Store, identity: JsonObject, about: JsonObject | None = None) -> None:
    """Write the header of a results folder, in place of an earlier header: the identity of its results, and ``about``.

    Later runs may change ``about``, but not the identity.
    """
    store.make()
    header: JsonObject = {
        "schema_version": _RESULTS_VERSION,
        "identity": identity,
        **({"about": about} if about else {}),
    }
    store.put(RESULTS_HEADER, serialise_header(header))


def _check_thought(protocol: Protocol, questions: LoadedQuestions, source: ModelSource, builder: PromptBuilder) -> None:
    """Raise UsageError where the model would be cut, or scored, inside a thought that its chat template opens.

    A generated reply of ``MIN_THOUGHT_TOKENS`` tokens or more is long enough. Options cannot be scored inside a
    thought.
    """
    tag = builder.open_tag
    if not tag or builder.policy.thought == "closed":
        return
    if protocol.choices != "generate" and any(item.options for item in questions.items):
        why, remedy = "scores the options there, as if they began the reasoning", ""
    elif (n_tokens := protocol.decoding.max_new_tokens) < MIN_THOUGHT_TOKENS:
        why = f"gives a reply {n_tokens} tokens, and what is cut inside the reasoning would be read as an option"
        remedy = f"give it --max-new-tokens {MIN_THOUGHT_TOKENS} or more, or "
    else:
        return
    raise UsageError(
        f"the chat template of {source.name} ends with {tag}: the model reasons first. The protocol {protocol.name} "
        f"{why}: {remedy}put {tag.replace('<', '</')} behind it with --close-thought"
    )


def _arms(config: EvaluateConfig, source: ModelSource, builder: PromptBuilder, answers: Store) -> Grid:
    """Return the arms that this model is asked under, by the labels of their answers; full retention is None.

    An arm has no positions of its own where they are the model family's, or the method prunes inside the model. The
    stored ``answers`` are read, since arms keep the labels that their answers have there.
    """
    with store_usage_errors():
        prunings = read_answers_header(answers)["identity"].get(PRUNINGS, {}) if answers.exists(ANSWERS_HEADER) else {}
    with usage_errors():
        usual, variant = builder.policy.positions, family_of(source).variant
        arms: dict[str, PruningSpec | None] = {}
        for label, requested in config.grid().items():
            if requested is None:
                arms[label] = None
                continue
            spec, pruner = requested.read(variant)
            usual_here = pruner.layer is not None or spec.positions == usual
            arm = replace(spec, positions=None) if usual_here else spec
            arms[_answers_label(arm, prunings)] = arm
    return arms


def _answers_label(spec: PruningSpec, prunings: Mapping[str, LateIdentity | None]) -> str:
    """Return the label under which the answers of an arm are stored.

    Older answers are stored under the label without a seed. Without such answers it is ``spec.label``. If their pruning
    has the seed of ``spec``, it is the label without a seed; else a label that names the seed of ``spec``, even seed 0.

    Args:
        prunings: the stored answers' labels -> the description of their pruning.
    """
    unseeded_label = replace(spec, seed=0).label
    if (unseeded := prunings.get(unseeded_label)) is None:
        return spec.label
    if unseeded.get("seed", 0) == spec.seed:
        return unseeded_label
    return replace(spec, params={**spec.params, "seed": str(spec.seed)}, seed=0).label


def _model(config: EvaluateConfig, cache_identity: CacheIdentity | None) -> ModelSource:
    """Return the model: the one asked for, which must fit the cache, else the cache's own, else tiny."""
    with usage_errors():
        if cache_identity is None:
            return ModelSource.resolve(config.model or "tiny", config.revision, family=config.family)
        identity = cache_identity["model"]
        named = choose_model(config.model, config.revision, identity["weights"])
        return ModelSource.resolve(*named, family=choose_family(identity, config.family))


def _require_whole(cache_identity: CacheIdentity | None, cache: str) -> CacheIdentity:
    """Return the identity of a cache of all tokens.

    Raises UsageError if there is no cache and none to be made, or if the cache does not have all tokens.
    """
    if cache_identity is None:
        raise UsageError(
            f"{cache} is no cache, and there is nothing to make one of: name the videos with --data, or with --cache "
            "one that python -m jobs.prune --pruner none made"
        )
    if not is_whole(cache_identity):
        raise UsageError(
            f"{cache} has only the tokens of {cache_identity['pruner']['method']} at "
            f"{cache_identity['retention_ratio']:g}, but methods are compared with full retention: make a cache with "
            "python -m jobs.prune --pruner none"
        )
    return cache_identity


def _match_answers(
    config: EvaluateConfig,
    answers: Store,
    cache_identity: CacheIdentity,
    grid: Grid,
    source: ModelSource,
    builder: PromptBuilder,
) -> MatchedIdentity:
    """Return the settings of the answers under the whole grid, matched with the stored answers.

    Raises UsageError for a method that cannot prune these tokens, or not with this engine. Raises it also if the stored
    answers have the same label for another seed, other weights or other code, or are of another engine. If every
    question has an answer, no later step compares the engine.
    """
    with usage_errors():
        prunings = {
            label: None if spec is None else resolve_pruning(spec, cache_identity, source, builder)
            for label, spec in grid.items()
        }
        ENGINES[config.engine].check(config, source, builder, prunings)
        methods = describe_prunings(prunings, cache_identity)
    requested: AnswersIdentity = {
        "cache": drop_evidence(cache_identity),
        PRUNINGS: json.loads(json.dumps(methods)),
        **describe_engine(config),
    }
    with store_usage_errors():
        return match_answers(answers, requested, redo=config.on_changed == REDO, compared_keys=(PRUNINGS, "engine"))


def plan_missing_videos(
    config: EvaluateConfig,
    grid: Grid,
    protocol: Protocol,
    source: ModelSource,
    cache: str,
    cache_identity: CacheIdentity | None,
) -> PruneConfig | None:
    """Return the options of the jobs.prune run that adds missing videos to the cache of all tokens, or None.

    None without ``--data``. None too if the cache has SigLIP evidence and no ``--siglip`` names the checkpoint to make
    more. The run samples frames by the protocol, and stores the evidence that the methods need. Its manifest is not set
    yet.

    Raises UsageError for a ``--siglip`` without use, and if the cache lacks evidence.
    """
    evidence = _evidence(grid, source, cache, cache_identity)
    heads = HEAD_SOURCES & {where for _, where in evidence}
    if config.siglip is not None and not heads:
        raise UsageError("--siglip: none of the methods takes anything from a SigLIP checkpoint")
    if config.data is None or (cache_identity is not None and heads and config.siglip is None):
        return None
    return PruneConfig(
        out=cache,
        video_root=[str(config.data), *config.video_root],
        on_forbidden="record",  # the benchmark has said already what is wrong with its videos
        model=source.name,
        family=identify_model(source).get("family"),
        pruner="none",
        retention_ratio=1.0,
        evidence=[f"{name}={where}" for name, where in sorted(evidence)],
        siglip=config.siglip,
        **frame_options(config, protocol, source),
        **config.shared_with(PruneConfig),
    )


def frame_options(config: EvaluateConfig, protocol: Protocol, source: ModelSource) -> dict[str, Any]:
    """Return the options of jobs.prune for frames and their sizes: the named options, else the protocol's.

    A protocol's limits of pixels go with a number of frames and the family of the model type; ``--fps`` and other
    families have the checkpoint's own limits.
    """
    if config.fps is not None:
        most = config.max_frames or family_of(source).default_max_frames
        cap = {} if config.max_video_tokens is None else {"max_video_tokens": config.max_video_tokens}
        return {"fps": config.fps, "max_frames": most, **cap}
    rules = protocol.rules(source.model_type, source.family)
    pixels = {} if rules.pixels is None else vars(rules.pixels)
    n_frames = config.num_frames or rules.frames.num_frames
    return {"num_frames": n_frames, "frame_rule": frame_rule(rules.frames), **pixels}


def frame_rule(rule: FrameRule) -> str:
    """Return a protocol's frame rule as jobs.prune names it. Raise UsageError if jobs.prune lacks the rule."""
    names = {("truncate", False): TRUNCATE, ("round", True): ROUND_EVEN}
    if (rule.rounding, rule.even) not in names:
        raise UsageError(f"frames that are {rule} are not sampled here")
    return names[rule.rounding, rule.even]


def check_frames(
    config: EvaluateConfig, protocol: Protocol, source: ModelSource, cache: str, cache_identity: CacheIdentity
) -> None:
    """Raise UsageError if an existing cache was made with other frames than the options or the protocol name.

    It accepts any cache if neither names frames for this model type, and a cache whose old header does not say its
    frames.
    """
    has_rules = source.model_type in protocol.models or protocol.others != ModelRules()
    is_requested = (config.num_frames or config.fps) is not None or has_rules
    if not is_requested or "sampling" not in cache_identity:
        return
    options, family = PruneConfig(**frame_options(config, protocol, source)), family_of(source)
    with usage_errors():
        sampling = make_sampling(options, family.default_max_frames, family.min_frames(), family.min_rule)
    requested = sampling_settings(sampling)
    if requested != cache_identity["sampling"]:
        raise IdentityMismatch(
            f"{cache} has the frames {cache_identity['sampling']}, but {protocol.name} needs {requested}: name another "
            "--cache, or its own frames with --num-frames, or --fps and --max-frames"
        )


def _evidence(
    grid: Grid, source: ModelSource, cache: str, cache_identity: CacheIdentity | None
) -> frozenset[tuple[str, str]]:
    """Return (name, source) of the evidence that methods need besides tokens; of an existing cache, all its evidence.

    Raises UsageError if an existing cache lacks evidence that a method needs.
    """
    needed_by: dict[tuple[str, str], str] = {}
    with usage_errors():
        for spec in grid.values():
            if spec is not None:
                needed = list_needed_evidence(spec.method, source.family, spec.params, source.model_type)
                needed_by |= dict.fromkeys(needed, spec.method)
    if cache_identity is None:
        return frozenset(needed_by)
    stored_pairs = name_source_pairs(cache_identity.get("evidence", {}))
    if missing_pairs := sorted(needed_by.keys() - stored_pairs):
        raise UsageError(
            f"{cache} has no {' and '.join(name for name, _ in missing_pairs)} for {needed_by[missing_pairs[0]]}: name "
            "another --cache, and all tokens are made again with it; existing answers stay"
        )
    return stored_pairs


def identify_cache(videos: PruneConfig, cache_store: Store, objects: Objects, console: Console) -> CacheIdentity:
    """Return the identity that the cache has or will have. Raise IdentityMismatch if an existing cache differs.

    Prints a note if the cache stores another ratio than the options name.
    """
    with usage_errors():
        recipe = resolve(videos, objects)
        with store_usage_errors():
            recipe = recipe.match_cache(cache_store, console)
    return recipe.identity("float32" if recipe.dtype == "auto" else recipe.dtype)
