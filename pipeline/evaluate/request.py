"""The check of a request to evaluate before anything starts: questions, protocol, model, methods, existing files."""

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
from gstep.evidence import HEAD_SOURCES, make_name_source_pairs
from gstep.language import PromptBuilder, prompt_builder
from gstep.methods import METHODS
from gstep.pruners import find_method
from pipeline.cache.changed_code import REDO
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.header import (
    HEADER,
    CacheIdentity,
    compute_fingerprint,
    identify_model,
    list_differences,
    read_header,
    read_header_file,
    serialize_header,
)
from pipeline.cache.live import LiveVideos, select_removed
from pipeline.cache.reader import TokenCache
from pipeline.cache.schema import hash_bytes
from pipeline.console import Say, make_speaker
from pipeline.errors import (
    IdentityMismatch,
    NotACache,
    NotResults,
    UsageError,
    convert_store_usage_errors,
    convert_usage_errors,
)
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.benchmarks.items import LoadedQuestions
from pipeline.evaluate.benchmarks.own import UserQuestions
from pipeline.evaluate.config import ANSWERS_FOLDER, CACHE_FOLDER, RESULTS_HEADER, EvaluateConfig
from pipeline.evaluate.protocols import FrameRule, ModelRules, Protocol
from pipeline.evaluate.scores import make_question_table, read_server_scores
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
from pipeline.generate.removal import read_removal_reasons
from pipeline.generate.request import drop_evidence
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import list_needed_evidence, make_sampling, make_sampling_identity, resolve_recipe
from pipeline.rows import Json, JsonObject
from pipeline.runner.run_record import check_out_folder
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at
from pipeline.video.sampling import ROUND_EVEN, TRUNCATE

#: The prunings under which every question is asked, by label; None is full retention.
Grid = Mapping[str, PruningSpec | None]
#: Minimum ``max_new_tokens`` for a model whose chat template opens a thought.
MIN_THOUGHT_TOKENS = 2048
_RESULTS_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """A checked request to evaluate, made by ``prepare``.

    Attributes:
        grid: the arms that every question is asked under, by the labels of their answers.
        thought: "closed" if --close-thought closes a tag that the chat template opens; otherwise "open".
        questions: the questions of ``loaded`` as a table of QUESTION_SCHEMA.
        store: the results.
        cache: the path or URI of the cache of all tokens.
        videos: the options of the jobs.prune run that adds missing videos to the cache, without a manifest; None if the
            cache is only read.
        answers: the settings of the answers, which decide which stored answers count.
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
        """The JSON-able settings that all results in one folder must share: benchmark, model, frames and protocol.

        With ``fps``, the frame rate and maximum replace the protocol's frames and pixel limits.
        """
        frames = choose_frame_options(self.config, self.protocol, self.source)
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
        """The bytes per token in a bfloat16 cache, deepstack levels included; None if the config has no hidden size."""
        config = self.source.config  # the weights may be gone once every question is answered
        width = (config.get("text_config") or config).get("hidden_size")
        levels = len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
        return BFLOAT16.token_bytes(width, levels) if width else None

    @property
    def names(self) -> dict[str, str]:
        """The name that each user method in the grid, imported here, gives itself, by import path, unless ambiguous."""
        kinds = {
            spec.method: find_method(spec.method) for spec in self.grid.values() if spec and spec.method not in METHODS
        }
        names = Counter([*METHODS, *(kind.name for kind in kinds.values())])
        return {path: kind.name for path, kind in kinds.items() if names[kind.name] == 1}

    @property
    def about(self) -> JsonObject:
        """JSON-able facts in which the results in one folder may differ.

        They are the model's name, a hash of questions and right answers, the bytes per cached token, and names of user
        methods.
        """
        questions = [
            [item.question_id, item.question, item.options, item.expected, *filter(None, [item.conversation])]
            for item in self.loaded.items
        ]
        annotations = hash_bytes(json.dumps(sorted(questions, key=str)).encode())
        names: JsonObject = {"names": self.names} if self.names else {}
        return {"model": self.source.name, "annotations": annotations, "token_bytes": self.token_bytes, **names}

    @property
    def title(self) -> str:
        """The title of the tables and the report page: the benchmark and the model."""
        return f"{self.benchmark.title}, {self.source.name}"


def _read_cache_identity(cache_store: Store, *, is_named: bool) -> CacheIdentity | None:
    """Return the identity in the cache's header, or None if there is no header yet.

    Raises:
        NotACache: the header is damaged, or a location that the user named has other files and no header.
    """
    with convert_store_usage_errors():
        identity = read_header(cache_store)["identity"] if cache_store.exists(HEADER) else None
        if identity is None and is_named and cache_store.has_other_files():
            raise NotACache(f"--cache {cache_store} exists and is no cache (it has no {HEADER}): name an empty place")
    return identity


def prepare(config: EvaluateConfig, console: Console) -> EvaluateRequest:
    """Check the options against the data, the model and all existing files, and return the request.

    Starts no run, writes nothing to the results, and reads no videos; of the weights it reads at most headers and
    samples, and SigLIP's pooling head. Missing small files of a Hugging Face model are downloaded, the check of the
    family ``generic`` may take minutes, and user methods and families are imported. Prints notes, such as on questions
    about removed videos.

    Raises:
        UsageError: the request cannot be carried out, or existing answers, results or cache do not match it.
        CorruptShard: a file of the cache's videos table, or of earlier removals, is damaged.
    """
    assert config.benchmark is not None  # the config refuses a request without it
    objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
    store = store_at(config.out, objects)
    cache = config.cache or config.join_out(CACHE_FOLDER)
    say = make_speaker(console)
    check_out_folder(store)
    cache_store = store_at(cache, objects)
    cache_identity = _read_cache_identity(cache_store, is_named=config.cache is not None)
    source = _resolve_model(config, cache_identity)
    benchmark = find_benchmark(config.benchmark).open(source.model_type, config.data, say)
    protocol = benchmark.protocol(config.protocol)
    if config.max_new_tokens is not None:
        protocol = replace(protocol, decoding=replace(protocol.decoding, max_new_tokens=config.max_new_tokens))
    questions = benchmark.load(config.data, [*map(Path, config.video_root)]).first(config.limit)
    answers_store = store_at(config.join_out(ANSWERS_FOLDER), objects)
    questions = _leave_removed(questions, answers_store, say)
    if cache_identity is not None:
        check_model(cache_store, cache_identity["model"], source)
    if config.data is None and cache_identity is not None:
        _note_uncached(questions, cache_store, say)
    with convert_usage_errors():
        builder = prompt_builder(source, thought="closed" if config.close_thought else "open")
    _check_thought(protocol, questions, source, builder)
    table = make_question_table(questions.items, protocol, source.model_type)
    if isinstance(benchmark, UserQuestions):
        refuse_placeholders(table, builder, benchmark.files[0])
    grid = _make_arms(config, source, builder, answers_store)
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
    with convert_store_usage_errors():
        match_results(store, request.identity)
        if benchmark.submission:
            read_server_scores(store)  # a malformed form is refused before the runs
    return request


def _leave_removed(questions: LoadedQuestions, answers: Store, say: Say) -> LoadedQuestions:
    """Return the questions without those about videos that were removed from the results; print how many, if any.

    Raises:
        UsageError: no question is left, or the answers' folder cannot be read.
    """
    with convert_store_usage_errors():
        barred = read_removal_reasons(answers)
    items = tuple(item for item in questions.items if barred.keys().isdisjoint(item.video_ids))
    if n_removed := len(questions.items) - len(items):
        line = f"{n_removed} of {len(questions.items)} questions are about videos that were removed from the results"
        if not items:
            raise UsageError(f"{line}: none is left")
        say(f"note: {line}: they are left out")
    return replace(questions, items=items)


def _note_uncached(questions: LoadedQuestions, place: Store, say: Say) -> None:
    """Print how many questions are about videos that the cache lacks, if any: they will fail, and count as wrong.

    Videos that were removed from the cache are not counted, since questions about them are not scored.
    """
    with convert_store_usage_errors():
        cache = TokenCache(str(place), store=place)
        absent_ids = {name for item in questions.items for name in item.video_ids if name not in cache}
        if not absent_ids:
            return
        rows = LiveVideos.open(place, compute_fingerprint(cache.identity)).rows_of(absent_ids, ("video_id", "status"))
    absent_ids.difference_update(select_removed(rows)["video_id"].to_pylist())
    if absent := [(item, name) for item in questions.items for name in item.video_ids if name in absent_ids]:
        n_questions = len({item.question_id for item, _ in absent})
        say(
            f"note: {n_questions} of {len(questions.items)} questions are about videos that {place} lacks, e.g. "
            f"{absent[0][1]!r} of {absent[0][0].question_id}: they will fail, and count as wrong"
        )


def match_results(store: Store, identity: JsonObject) -> None:
    """Check that results with this identity can be written to ``store``; an empty store is accepted.

    Raises:
        IdentityMismatch: the store holds results with another identity.
        NotResults: it holds other files and no header, or the header is damaged.
    """
    if not store.exists(RESULTS_HEADER):
        if store.has_other_files():
            raise NotResults(f"{store} exists and holds no results (it has no {RESULTS_HEADER}): name an empty place")
        return
    header = read_results_header(store)
    requested = json.loads(json.dumps(identity))
    if differences := list_differences(cast(JsonObject, header["identity"]), requested, old_subject="the results have"):
        raise IdentityMismatch(
            f"{store} holds results of other settings, and all results in a folder must share theirs:\n  "
            + "\n  ".join(differences)
            + "\nUse the settings of the results, or another --out."
        )


def read_results_header(store: Store) -> dict[str, Json]:
    """Read ``evaluation.json``, the header of a results folder.

    Raises:
        NotResults: the header is missing, damaged or of another version.
    """
    absent = f"no results of python -m jobs.evaluate --benchmark (no {RESULTS_HEADER})"
    return read_header_file(store, RESULTS_HEADER, (_RESULTS_VERSION,), NotResults, absent, of="results of ")


def write_results_header(store: Store, identity: JsonObject, about: JsonObject | None = None) -> None:
    """Write the header of results, replacing an earlier one; create the folder if necessary.

    Args:
        about: facts that later runs may change.
    """
    store.make()
    header: JsonObject = {
        "schema_version": _RESULTS_VERSION,
        "identity": identity,
        **({"about": about} if about else {}),
    }
    store.put(RESULTS_HEADER, serialize_header(header))


def _check_thought(protocol: Protocol, questions: LoadedQuestions, source: ModelSource, builder: PromptBuilder) -> None:
    """Raise UsageError if a reply would be cut, or options scored, inside a thought that the chat template opens.

    Generated replies pass with at least ``MIN_THOUGHT_TOKENS`` tokens. Everything passes if --close-thought closes the
    tag.
    """
    tag = builder.open_tag
    if not tag or builder.policy.thought == "closed":
        return
    if protocol.choices != "generate" and any(item.options for item in questions.items):
        why = "scores the options there, as if they began the reasoning"
        remedy = ""
    elif (n_tokens := protocol.decoding.max_new_tokens) < MIN_THOUGHT_TOKENS:
        why = f"gives a reply {n_tokens} tokens, and a reply cut inside the reasoning would be read as an option"
        remedy = f"give --max-new-tokens {MIN_THOUGHT_TOKENS} or more, or "
    else:
        return
    raise UsageError(
        f"the chat template of {source.name} ends with {tag}: the model reasons first. The protocol {protocol.name} "
        f"{why}: {remedy}append {tag.replace('<', '</')} with --close-thought"
    )


def _make_arms(config: EvaluateConfig, source: ModelSource, builder: PromptBuilder, answers: Store) -> Grid:
    """Return the arms by the labels under which their answers are stored; full retention is None.

    An arm's ``positions`` is None if they are the model family's default, or if the method prunes inside the model.
    Reads the header of the stored answers, because arms keep the labels of existing answers.

    Raises:
        UsageError: a method or parameter is unknown or malformed, or the answers' header cannot be read.
    """
    with convert_store_usage_errors():
        prunings = read_answers_header(answers)["identity"].get(PRUNINGS, {}) if answers.exists(ANSWERS_HEADER) else {}
    with convert_usage_errors():
        usual = builder.policy.positions
        variant = family_of(source).variant
        arms: dict[str, PruningSpec | None] = {}
        for label, requested in config.grid().items():
            if requested is None:
                arms[label] = None
                continue
            spec, pruner = requested.read(variant)
            usual_here = pruner.layer is not None or spec.positions == usual
            arm = replace(spec, positions=None) if usual_here else spec
            arms[_choose_answers_label(arm, prunings)] = arm
    return arms


def _choose_answers_label(spec: PruningSpec, prunings: Mapping[str, LateIdentity | None]) -> str:
    """Return the label under which the answers of an arm are stored.

    This is ``spec.label``, unless older answers exist under the label without a seed. If those have the seed of
    ``spec``, return their label; otherwise return a label that names the seed of ``spec``, even if it is 0.
    """
    unseeded_label = replace(spec, seed=0).label
    if (unseeded := prunings.get(unseeded_label)) is None:
        return spec.label
    if unseeded.get("seed", 0) == spec.seed:
        return unseeded_label
    return replace(spec, params={**spec.params, "seed": str(spec.seed)}, seed=0).label


def _resolve_model(config: EvaluateConfig, cache_identity: CacheIdentity | None) -> ModelSource:
    """Return the model to ask: the one that the options name, otherwise the cache's model, or ``tiny`` without a cache.

    Raises:
        UsageError: the model cannot be resolved, or the cache names only a folder or a user family, which the options
            must then name.
    """
    with convert_usage_errors():
        if cache_identity is None:
            return ModelSource.resolve(config.model or "tiny", config.revision, family=config.family)
        identity = cache_identity["model"]
        named = choose_model(config.model, config.revision, identity["weights"])
        return ModelSource.resolve(*named, family=choose_family(identity, config.family))


def _require_whole(cache_identity: CacheIdentity | None, cache: str) -> CacheIdentity:
    """Return ``cache_identity`` if it describes a cache of all tokens.

    Raises:
        UsageError: there is no cache and no data to make one from, or the cache holds only some of the tokens or may
            hold merged ones.
    """
    if cache_identity is None:
        raise UsageError(
            f"{cache} is not a cache, and there are no videos to make one from: name the videos with --data, or with "
            "--cache a cache that python -m jobs.prune --pruner none made"
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
    """Return the settings of the answers under the whole grid, after comparing them with those of the stored answers.

    Raises:
        UsageError: a method cannot prune these tokens, or cannot be used with this engine.
        IdentityMismatch: stored answers with the same label have another seed, other weights or, unless ``on_changed``
            is "redo", other code; or they come from another engine.
    """
    with convert_usage_errors():
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
    with convert_store_usage_errors():
        return match_answers(answers, requested, redo=config.on_changed == REDO, compared_keys=(PRUNINGS, "engine"))


def plan_missing_videos(
    config: EvaluateConfig,
    grid: Grid,
    protocol: Protocol,
    source: ModelSource,
    cache: str,
    cache_identity: CacheIdentity | None,
) -> PruneConfig | None:
    """Return the options of the jobs.prune run that adds missing videos to the cache of all tokens, or None for no run.

    There is no run without ``config.data``, and none if the existing cache has SigLIP evidence while no --siglip names
    the checkpoint to make more. The run stores the evidence that the methods need. Its manifest is not set yet.

    Args:
        cache_identity: None if there is no cache yet.

    Raises:
        UsageError: --siglip is given but no method uses it, the cache lacks evidence, or an option is invalid.
    """
    evidence = _list_evidence(grid, source, cache, cache_identity)
    heads = HEAD_SOURCES & {where for _, where in evidence}
    if config.siglip is not None and not heads:
        raise UsageError("--siglip: none of the methods takes anything from a SigLIP checkpoint")
    if config.data is None or (cache_identity is not None and heads and config.siglip is None):
        return None
    return PruneConfig(
        out=cache,
        video_root=[str(config.data), *config.video_root],
        on_forbidden="record",  # the benchmark has already reported what is wrong with its videos
        model=source.name,
        family=identify_model(source).get("family"),
        pruner="none",
        retention_ratio=1.0,
        evidence=[f"{name}={where}" for name, where in sorted(evidence)],
        siglip=config.siglip,
        **choose_frame_options(config, protocol, source),
        **config.select_shared_options(PruneConfig),
    )


def choose_frame_options(config: EvaluateConfig, protocol: Protocol, source: ModelSource) -> dict[str, Any]:
    """Return the jobs.prune options for frames and their sizes: those that ``config`` names, otherwise the protocol's.

    With ``fps``, the checkpoint's size limits apply, and ``max_frames`` defaults to the model family's. Otherwise the
    protocol's pixel limits apply, also to another ``num_frames``, unless the model is read by another family than that
    of its type.

    Raises:
        UsageError: jobs.prune does not have the protocol's frame rule.
    """
    if config.fps is not None:
        most = config.max_frames or family_of(source).default_max_frames
        cap = {} if config.max_video_tokens is None else {"max_video_tokens": config.max_video_tokens}
        return {"fps": config.fps, "max_frames": most, **cap}
    rules = protocol.get_rules(source.model_type, source.family)
    pixels = {} if rules.pixels is None else vars(rules.pixels)
    n_frames = config.num_frames or rules.frames.num_frames
    return {"num_frames": n_frames, "frame_rule": get_frame_rule_name(rules.frames), **pixels}


def get_frame_rule_name(rule: FrameRule) -> str:
    """Return the name of a frame rule in jobs.prune; raise UsageError if it has no such rule."""
    names = {("truncate", False): TRUNCATE, ("round", True): ROUND_EVEN}
    if (rule.rounding, rule.even) not in names:
        raise UsageError(f"jobs.prune cannot sample frames by {rule}")
    return names[rule.rounding, rule.even]


def check_frames(
    config: EvaluateConfig, protocol: Protocol, source: ModelSource, cache: str, cache_identity: CacheIdentity
) -> None:
    """Raise IdentityMismatch if an existing cache was made with other frames than the options or the protocol require.

    Any cache passes if neither sets frames for this model type, or if the cache's header is too old to state them.
    """
    has_rules = source.model_type in protocol.models or protocol.others != ModelRules()
    is_requested = (config.num_frames or config.fps) is not None or has_rules
    if not is_requested or "sampling" not in cache_identity:
        return
    options = PruneConfig(**choose_frame_options(config, protocol, source))
    family = family_of(source)
    with convert_usage_errors():
        sampling = make_sampling(options, family.default_max_frames, family.min_frames(), family.min_rule)
    requested = make_sampling_identity(sampling)
    if requested != cache_identity["sampling"]:
        raise IdentityMismatch(
            f"{cache} has the frames {cache_identity['sampling']}, but {protocol.name} needs {requested}: name another "
            "--cache, or its own frames with --num-frames, or --fps and --max-frames"
        )


def _list_evidence(
    grid: Grid, source: ModelSource, cache: str, cache_identity: CacheIdentity | None
) -> frozenset[tuple[str, str]]:
    """Return the (name, source) pairs of evidence to store beside the tokens: what the methods need.

    For an existing cache, return all evidence that it has.

    Raises:
        UsageError: a method is unknown, or an existing cache lacks evidence that a method needs.
    """
    needed_by: dict[tuple[str, str], str] = {}
    with convert_usage_errors():
        for spec in grid.values():
            if spec is not None:
                needed = list_needed_evidence(spec.method, source.family, spec.params, source.model_type)
                needed_by |= dict.fromkeys(needed, spec.method)
    if cache_identity is None:
        return frozenset(needed_by)
    stored_pairs = make_name_source_pairs(cache_identity.get("evidence", {}))
    if missing_pairs := sorted(needed_by.keys() - stored_pairs):
        raise UsageError(
            f"{cache} has no {' and '.join(name for name, _ in missing_pairs)} for {needed_by[missing_pairs[0]]}: name "
            "another --cache, and all tokens are made again with it; existing answers stay"
        )
    return stored_pairs


def identify_cache(videos: PruneConfig, cache_store: Store, objects: Objects, console: Console) -> CacheIdentity:
    """Return the identity that the cache has, or will have once it is made; an undecided dtype counts as float32.

    Prints a note if the cache stores a larger ratio than ``videos`` names.

    Raises:
        IdentityMismatch: the existing cache has another identity.
        UsageError: the options cannot be resolved, or the store cannot be read.
        CorruptShard: a file of the cache's videos table is damaged.
    """
    with convert_usage_errors():
        recipe = resolve_recipe(videos, objects)
        with convert_store_usage_errors():
            recipe = recipe.match_cache(cache_store, console)
    return recipe.identity("float32" if recipe.dtype == "auto" else recipe.dtype)
