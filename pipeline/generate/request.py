"""A request for answers: the options, checked against the questions, the cache, the model and the stored answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from gstep.backbones import ModelSource
from gstep.language import PromptBuilder, PromptPolicy
from pipeline.cache.changed_code import REDO
from pipeline.cache.header import (
    CacheIdentity,
    compute_fingerprint,
    get_method_declarations,
    identify_model,
    read_header,
)
from pipeline.cache.live import LiveVideos, collect_hidden_sizes, select_ok
from pipeline.cache.reader import MAX_HINTS, TokenOrder
from pipeline.console import make_speaker
from pipeline.errors import UsageError, convert_store_usage_errors, convert_usage_errors
from pipeline.generate.answer_setup import LIVE_COLUMNS, AnswerSetup, PromptForecast
from pipeline.generate.answers import (
    PRUNINGS,
    AnswersIdentity,
    AnswersTable,
    check_answers_folder,
    find_code,
    list_shards,
    match_answers,
    read_answers_header,
    write_answers_header,
)
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import ENGINES, VLLM, describe_engine
from pipeline.generate.late_pruning import LatePruning, PruningSpec, describe_prunings, resolve_pruning
from pipeline.generate.model import check_tokens, find_model, make_prompt_builder, read_tower_hash
from pipeline.generate.questions import (
    QUESTION_SCHEMA,
    AnswerMode,
    describe_decoding,
    explain_count_from_1,
    make_questions,
    read_questions,
    refuse_placeholders,
)
from pipeline.generate.remaining import (
    format_answered,
    format_encoded_again,
    format_new_targets,
    format_removed,
    select_remaining_questions,
)
from pipeline.generate.removal import read_removal_reasons
from pipeline.rows import QuestionRecord
from pipeline.runner.run_record import check_out_folder
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at


@dataclass(frozen=True)
class AnswerRequest:
    """A request whose options, questions, cache, model and stored answers are compatible.

    Attributes:
        store: the folder of the answers.
        questions: table with the columns of QUESTION_SCHEMA and the carried columns.
        setup: the settings of the workers; the device is not chosen yet.
        identity: the settings that all answers in the store share; those of the options until ``match_answers``.
        video_runs: the columns of the questions' videos that ``format_encoded_again`` takes.
        is_evaluation: True if an evaluation made the request, which scores the answers with its own annotations.
        is_code_changed: True if a user method has other code now, so its stored answers are made again.
    """

    config: GenerateConfig
    console: Console
    store: Store
    questions: pa.Table
    setup: AnswerSetup
    forecast: PromptForecast
    identity: AnswersIdentity
    video_runs: pa.Table
    is_evaluation: bool = False
    is_code_changed: bool = False

    @property
    def n_questions(self) -> int:
        """The number of questions times the number of prunings."""
        return len(self.questions) * len(self.setup.prunings)

    def match_answers(self) -> AnswerRequest:
        """Compare the request with the answers stored now; return a copy with ``identity`` and ``is_code_changed`` set.

        Raises:
            IdentityMismatch: the stored answers were made with other settings, or good ones with other code of a user
                method (unless ``--on-changed redo``).
        """
        identity, is_changed = match_answers(self.store, self.identity, redo=self.config.on_changed == REDO)
        return replace(self, identity=identity, is_code_changed=is_changed)

    def select_todo(self) -> tuple[AnswersTable, list[QuestionRecord]]:
        """Read the stored answers, print notes, and return them with the questions still to ask, once for each pruning.

        If the code of a user method has changed, this writes the header with the new code, so that answers made with
        the old code are no longer live.

        Raises:
            QuestionsChanged: a question that has a good answer has changed.
        """
        store = self.store
        forecast = self.forecast
        say = make_speaker(self.console)
        table = AnswersTable(store, self.identity)
        if self.is_code_changed:  # from now on, rows made with other code are not live
            say(f"note: a method has other code now: its questions in {store} are asked again")
            self.write_header()
        live = table.select_live_answers(self.questions, self.setup.prunings)
        to_ask = self.questions.select(QUESTION_SCHEMA.names)
        codes = {name: find_code(self.identity, name) for name in self.setup.prunings}
        todo = select_remaining_questions(store, live, to_ask, codes, self.config, forecast.cached, forecast.removed)
        lines = [
            *format_answered(live, self.n_questions, todo, self.config),
            *format_removed(store, live, todo, forecast.removed),
            *format_encoded_again(store, live, self.video_runs),
        ]
        if not self.is_evaluation:
            lines += format_new_targets(store, live, self.questions)
            targets = zip(*(self.questions[name].to_pylist() for name in ("target", "choices")), strict=True)
            if reason := explain_count_from_1(targets):
                lines.append(f"note: {reason}; jobs.evaluate --score refuses these")
        for line in lines:
            say(line)
        return table, todo

    def write_header(self) -> None:
        """Write answers.json with the identity; while answers are stored, it keeps the prunings of earlier runs."""
        identity = self.identity
        if PRUNINGS in identity and list_shards(self.store)[0]:
            earlier = read_answers_header(self.store)["identity"].get(PRUNINGS, {})
            identity = {**identity, PRUNINGS: {**earlier, **identity[PRUNINGS]}}
        write_answers_header(self.store, identity)


def check_request(
    config: GenerateConfig,
    console: Console,
    questions: pa.Table | None = None,
    specs: Mapping[str, PruningSpec | None] | None = None,
    evaluation: AnswersIdentity | None = None,
) -> AnswerRequest:
    """Check the options against the questions, the cache, the model and the stored answers; start and write nothing.

    Prints notes, for example about prompts that are too long. With vLLM it may import vLLM and set its environment
    variables; the gate of a generic model may take a minute or two.

    Args:
        questions: table with the columns of QUESTION_SCHEMA and carried columns. None reads the file
            ``config.questions``, or makes the questions of ``config.ask``, up to ``config.limit``.
        specs: name -> pruning under which every question is asked. None uses the pruning of the options, named "".
        evaluation: the entries that an evaluation adds to the identity of the answers. Its questions may have the
            model's placeholders, and get no notes about the model.

    Raises:
        UsageError: the request cannot be carried out, or a file or store cannot be read.
        CorruptShard: a file of the cache's table, of the answers or of ``removed/`` is damaged.
    """
    say = make_speaker(console)
    specs = {"": make_pruning_spec(config)} if specs is None else specs
    objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
    if questions is None and config.questions is not None:
        with convert_store_usage_errors():
            questions = read_questions(config.questions, AnswerMode.of(config), objects, config.limit)
    cache, store = store_at(config.cache, objects), store_at(config.out, objects)
    check_out_folder(store)
    with convert_store_usage_errors():
        header = read_header(cache)
        videos = LiveVideos.open(cache, compute_fingerprint(header["identity"]))
        if questions is None:
            questions = make_questions(config.ask, _list_videos_with_tokens(videos, config), AnswerMode.of(config))
            questions = questions.slice(0, config.limit)
        video_ids = pc.unique(pc.list_flatten(questions["video_ids"])).to_pylist()
        live = videos.rows_of(video_ids, (*LIVE_COLUMNS, "run_id"))
        known_ids = set(live["video_id"].to_pylist())
        near = {name: videos.near(name) for name in islice((v for v in video_ids if v not in known_ids), MAX_HINTS)}
        check_answers_folder(store)
        removal_reasons = read_removal_reasons(store)
    cache_identity = header["identity"]
    # vLLM accepts other weights, too, if they have the vision encoder that made the cache.
    tower = partial(read_tower_hash, cache, header) if config.engine == VLLM else None
    with convert_usage_errors(), convert_store_usage_errors():
        source = find_model(cache, cache_identity["model"], config.model, config.revision, tower, config.family)
        builder = make_prompt_builder(source, config)
    check_tokens(cache, header, collect_hidden_sizes(live), builder)
    if evaluation is None:
        refuse_placeholders(
            questions, builder, config.questions or "--ask"
        )  # the user cannot change a benchmark's texts
        for line in _note_model_habits(source, builder, questions):
            say(line)
    prunings = resolve_prunings(config, specs, cache_identity, source, builder)
    late = prunings.get("")
    if late is not None and config.retention_ratio not in (None, late.retention_ratio):
        shares = f"{late.retention_ratio:g} of the tokens, not {config.retention_ratio:g}"
        say(f"note: --pruner {config.pruner} keeps {shares}")
    order = choose_token_order(config, cache_identity, prunings)
    setup = AnswerSetup(config, source, cache, live.drop_columns(["run_id"]), prunings, order)
    forecast = PromptForecast(setup, builder, near, removal_reasons)
    forecast.check_ratio(cache_identity["retention_ratio"])
    forecast.check_context(questions, console)
    setup = replace(setup, largest_video=forecast.largest_video())
    if config.engine == VLLM:
        with convert_usage_errors():
            ENGINES[VLLM].check_memory(config, source, setup.largest_video)
    identity = identify_answers(setup, cache_identity, builder.policy, evaluation)
    video_runs = live.select(["video_id", "status", "run_id", "rewritten"])
    is_evaluation = evaluation is not None
    request = AnswerRequest(config, console, store, questions, setup, forecast, identity, video_runs, is_evaluation)
    with convert_store_usage_errors():
        request.match_answers()
    return request


def _list_videos_with_tokens(videos: LiveVideos, config: GenerateConfig) -> list[str]:
    """List the cache's videos that have tokens. Raises UsageError if there are none."""
    ids: list[str] = select_ok(videos.live(("video_id", "status")))["video_id"].to_pylist()
    if not ids:
        raise UsageError(f"--ask: no video in {config.cache} has tokens; python -m jobs.prune makes some")
    return ids


def _note_model_habits(source: ModelSource, builder: PromptBuilder, questions: pa.Table) -> Iterator[str]:
    """Yield notes for a model whose template opens a reasoning tag, and for open questions to the shipped model."""
    if builder.open_tag and builder.policy.thought == "open":
        yield (
            f"note: the chat template of {source.name} ends with {builder.open_tag}, so the model reasons first. "
            "Choices are scored, and short answers cut, inside the reasoning. Give --choices generate and "
            "--max-new-tokens of some thousands, or --close-thought"
        )
    n_open = questions["choices"].null_count
    if n_open and source.files.kind == "shipped":
        yield (
            f"note: {n_open} of {len(questions)} questions have no choices. {source.name} was trained only on "
            "questions with choices: it answers any question with the letter of a choice"
        )


def make_pruning_spec(config: GenerateConfig) -> PruningSpec | None:
    """Return the pruning that the options describe, or None without ``--pruner``."""
    if config.pruner is None:
        return None
    assert config.retention_ratio is not None  # GenerateConfig refuses a method without a ratio
    return PruningSpec(config.pruner, config.retention_ratio, config.pruner_params(), config.siglip, config.pruner_seed)


def resolve_prunings(
    config: GenerateConfig,
    specs: Mapping[str, PruningSpec | None],
    cache_identity: CacheIdentity,
    source: ModelSource,
    builder: PromptBuilder,
) -> dict[str, LatePruning | None]:
    """Check each named pruning against the cache, the model and the engine, and return it resolved; None stays None.

    A user method is imported, and vLLM if it gets engine parameters.

    Raises:
        UsageError: a method is unknown, or not supported by the cache, the model or the engine; or no pruning uses
            ``config.siglip``.
    """
    with convert_usage_errors():
        prunings = {
            name: None if spec is None else resolve_pruning(spec, cache_identity, source, builder)
            for name, spec in specs.items()
        }
        ENGINES[config.engine].check(config, source, builder, prunings)
    takes_siglip = any(late is not None and late.text_tower is not None for late in prunings.values())
    if config.siglip is not None and not takes_siglip:
        raise UsageError("--siglip: no method that is asked takes anything from a SigLIP checkpoint here")
    return prunings


def choose_token_order(
    config: GenerateConfig, cache_identity: CacheIdentity, prunings: Mapping[str, LatePruning | None]
) -> TokenOrder:
    """Return the order in which stored tokens are read for prompts, "selection" or "index".

    It is "selection" only if the cache's method defines an order for prompts (``reorders``), no method prunes the
    tokens again now, and ``config.order`` is not "index".

    Raises:
        UsageError: ``config.order`` is "own", and no method that prunes the tokens defines an order.
    """
    method = get_method_declarations(cache_identity)
    lates = [late for late in prunings.values() if late is not None]
    # A method that prunes now derives frames from the ascending order of the tokens.
    has_own_order = method is not None and method.reorders and not lates
    late = any(late.pruner.reorders for late in lates)
    if config.order == "own" and not (has_own_order or late):
        raise UsageError(
            f"--order own: {config.pruner or cache_identity['pruner']['method']}, which prunes the tokens, has no "
            "order of its own in a prompt"
        )
    return "selection" if has_own_order and config.order != "index" else "index"


def identify_answers(
    setup: AnswerSetup, cache_identity: CacheIdentity, policy: PromptPolicy, evaluation: AnswersIdentity | None = None
) -> AnswersIdentity:
    """Return the settings that all answers in one folder share, JSON-able.

    A single pruning, named "", is described under ``pruner`` (which is absent if it is None: the stored tokens are
    used), and the order of the prompt's tokens is "selection" or "index". Several are described by name under PRUNINGS,
    to which later runs may add; the order is then "own" or "index", and the cache is described without its evidence.

    Args:
        evaluation: further settings of jobs.evaluate, which replace equal keys except ``pruner`` and PRUNINGS.
    """
    config = setup.config
    mode = AnswerMode.of(setup.config)
    has_several = "" not in setup.prunings
    late = setup.prunings.get("")
    if has_several:  # later runs may add methods
        order = "own" if setup.own_order else "index"
    else:
        order = "selection" if late is not None and late.pruner.reorders and setup.own_order else setup.order
    stored_ratio = cache_identity["retention_ratio"]
    identity: AnswersIdentity = {
        "cache": drop_evidence(cache_identity) if has_several else cache_identity,
        "model": identify_model(setup.source),
        "retention_ratio": stored_ratio if config.retention_ratio is None else config.retention_ratio,
        "prompt": {**policy.describe(), "order": order},
        "decoding": {"choices": mode.method, "system": mode.system, **describe_decoding(mode.decoding)},
        **describe_engine(config),
        **(evaluation or {}),
    }
    if late is not None:
        identity["pruner"] = late.describe()
    if has_several:
        identity[PRUNINGS] = describe_prunings(setup.prunings, cache_identity)
    return identity


def drop_evidence(cache_identity: CacheIdentity) -> CacheIdentity:
    """Return a copy of a cache's identity without the description of its evidence."""
    identity = cache_identity.copy()
    model = cache_identity["model"].copy()
    identity.pop("evidence", None)
    model.pop("pooling_head", None)
    dtype = {name: value for name, value in cache_identity["dtype"].items() if name != "evidence"}
    return {**identity, "model": model, "dtype": dtype}
